// SPDX-License-Identifier: Apache-2.0
//
// Which GPU an op is launched on.
#pragma once

#include "absl/status/statusor.h"

#include "crumb/cuda/device.h"

namespace crumb::gpu {

// The current GPU, which must be that of `stream`: CUDA itself would run the kernel on the
// stream's, with addresses of this one. INVALID_ARGUMENT names both; other errors as CurrentGpu.
// About 20 ns, and allowed while the stream is captured. Thread-safe.
absl::StatusOr<GpuDevice> LaunchGpu(GpuStream stream);

}  // namespace crumb::gpu
