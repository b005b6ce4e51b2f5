// SPDX-License-Identifier: Apache-2.0
//
// The GPU that ops run on, for code that knows nothing of CUDA's headers. A build without CUDA has
// the same functions and answers UNIMPLEMENTED. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

struct CUstream_st;

namespace crumb {

// A cudaStream_t. Null is the device's default stream. Ops run on the current device; a stream of
// another is INVALID_ARGUMENT.
using GpuStream = CUstream_st*;

struct GpuDevice {
  int index = 0;  // Of cudaSetDevice.
  std::string name;
  int major = 0;  // Compute capability.
  int minor = 0;
  uint32_t num_multiprocessors = 0;
  size_t l2_bytes = 0;
  size_t shared_memory_per_block = 0;  // The most that a block may ask for.
};

// The calling thread's current device. UNIMPLEMENTED: this build has no CUDA. UNAVAILABLE: no
// device, or its driver cannot run this build; the message says which and what to do. Nothing is
// kept of a failure: a later call of any op may succeed.
absl::StatusOr<GpuDevice> CurrentGpu();

// Whether the stream is of the current device, as every op asks before it launches.
// INVALID_ARGUMENT names both devices; else as CurrentGpu. About 20 ns, and allowed while the
// stream is captured.
absl::Status CheckStream(GpuStream stream);

}  // namespace crumb
