// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/checksum_pages.h"

#include "cuda/gpu/checksum_plan.h"
#include "cuda/gpu/cuda_status.h"
#include "cuda/gpu/launch_gpu.h"
#include "proto/base/status_macros.h"

namespace crumb {

absl::Status ChecksumPages(const ChecksumPagesParams& params, GpuStream stream) {
  CRUMB_RETURN_IF_ERROR(ValidateChecksumPages(params));
  CRUMB_ASSIGN_OR_RETURN(const GpuDevice device, gpu::LaunchGpu(stream));
  const gpu::ChecksumPlan plan = gpu::PlanChecksum(params, device.num_multiprocessors * 32);
  return gpu::CudaStatus(gpu::LaunchChecksumPages(params, plan, device.num_multiprocessors,
                                                  device.shared_memory_per_block, stream),
                         "launching checksums");
}

}  // namespace crumb
