// SPDX-License-Identifier: Apache-2.0
//
// Decode attention of many sequences that share a prefix: the prefix's pages are read once for the
// whole batch, as one matrix product with the queries of all sequences; what each sequence has for
// itself goes through split decode; the two are merged by their log-sum-exp.
//
// Benefits: at 32 sequences the prefix costs what its arithmetic costs on the tensor cores, not 32
// times its bytes. Costs: the prefix is read at half precision, queries and keys as they are,
// probabilities and values with 11 bits, so outputs differ from split decode's by up to about 1e-3
// of the largest |v|; three launches instead of one; Hopper only.
//
// No allocation, no synchronisation, capturable in a CUDA graph, the same bits from run to run on
// one device. Thread-safe.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "crumb/cuda/decode_params.h"
#include "crumb/cuda/device.h"

namespace crumb {

struct SharedDecodeParams {
  // The batch. Its history and windows are what each sequence has after the prefix; they may be
  // empty. Its workspace must have SharedDecodeWorkspaceBytes. history_is_settled speaks of the
  // prefix too.
  SplitDecodeParams batch;
  // [1, stride]: INT2 pages that every sequence starts with; offset and stride as batch.history's.
  DevicePageTable prefix;
  const uint32_t* prefix_pages = nullptr;  // [1], <= prefix.stride.
};

// Errors as SplitDecodeWorkspaceBytes; INVALID_ARGUMENT also for a batch or a stride that
// ValidateSharedDecode refuses.
absl::StatusOr<size_t> SharedDecodeWorkspaceBytes(const SharedDecodeParams& params);

// As ValidateSplitDecode, for the batch and the prefix.
absl::Status ValidateSharedDecode(const SharedDecodeParams& params);

// Validates and enqueues on `stream`. Errors as SplitDecode; UNIMPLEMENTED also for a device that
// is not of compute capability 9.0: put the prefix's pages first in each sequence's history there
// and use SplitDecode. What launches find wrong in device memory:
// TakeSplitDecodeProblem(params.batch).
absl::Status SharedDecode(const SharedDecodeParams& params, GpuStream stream);

// The readable twin, in double: the same parameters with pointers to host memory. Workspace unused.
absl::Status SharedDecodeReference(const SharedDecodeParams& params);

}  // namespace crumb
