// SPDX-License-Identifier: Apache-2.0
//
// Decode attention on the GPU, over INT2 history and BF16 windows in place. It reads 72 bytes a
// token, KV head and 128 channels where BF16 needs 512, and is bound by reading them.
//
// One launch: the work of all sequences is cut into equal shares of head blocks, one share a thread
// block, and shares of one head are merged by the last of their blocks, always in the same order.
// So results are the same bits from run to run on one device, whatever else the device does.
// Benefits: ragged batches balance themselves, lengths stay on the device, a captured graph serves
// any lengths. Costs: the merge adds one or two microseconds to a launch, and blocks wait for
// earlier ones there.
//
// SplitDecodeParams::history_is_settled is worth setting from some 32,000 tokens of history a
// launch on; for less, queries come later than they would, and for very much it is ignored.
//
// No allocation, no synchronisation, capturable in a CUDA graph. Thread-safe.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "crumb/cuda/decode_params.h"
#include "crumb/cuda/device.h"

namespace crumb {

// Bytes of workspace for this shape on the current device; num_sequences does not matter. Errors as
// CurrentGpu.
absl::StatusOr<size_t> SplitDecodeWorkspaceBytes(const SplitDecodeParams& params);

// What can be told without reading device memory. INVALID_ARGUMENT names the field, its value and
// the limit.
absl::Status ValidateSplitDecode(const SplitDecodeParams& params);

// Validates and enqueues on `stream`. INVALID_ARGUMENT as ValidateSplitDecode, UNIMPLEMENTED or
// UNAVAILABLE as CurrentGpu, INTERNAL with CUDA's words for a launch that was refused.
absl::Status SplitDecode(const SplitDecodeParams& params, GpuStream stream);

// What a launch found wrong in device memory: a null page, or a length beyond its table. Such pages
// are left out, reads stay within the tables, and the finding stays in the workspace until this
// call takes it out. Also, that a block waited ten seconds for another's part: lengths changed
// while the launch ran, or two launches at once had one workspace, which must be zeroed then. Waits
// for `stream`. INVALID_ARGUMENT names the table and a sequence.
absl::Status TakeSplitDecodeProblem(const SplitDecodeParams& params, GpuStream stream);

// The readable twin, in double: the same parameters with pointers to host memory. Workspace unused.
absl::Status SplitDecodeReference(const SplitDecodeParams& params);

}  // namespace crumb
