// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/demote_pages.h"

#include "cuda/gpu/cuda_status.h"
#include "cuda/gpu/launch_gpu.h"
#include "cuda/gpu/take_word.h"
#include "cuda/launch/demote_pages.h"
#include "proto/base/status_macros.h"

namespace crumb {

absl::Status DemotePages(const DemotePagesParams& params, GpuStream stream) {
  CRUMB_RETURN_IF_ERROR(ValidateDemotePages(params));
  CRUMB_ASSIGN_OR_RETURN(const GpuDevice device, gpu::LaunchGpu(stream));
  const gpu::LaunchDemotePages launch = params.heads.head_dim == 64    ? gpu::LaunchDemotePages64
                                        : params.heads.head_dim == 128 ? gpu::LaunchDemotePages128
                                                                       : gpu::LaunchDemotePages256;
  return gpu::CudaStatus(
      launch(params, /*has_warpgroups=*/device.major == 9, device.num_multiprocessors, stream),
      "launching demotion");
}

absl::Status TakeDemotePagesProblem(const DemotePagesParams& params, GpuStream stream) {
  CRUMB_RETURN_IF_ERROR(ValidateDemotePages(params));
  if (params.has_finding_per_page) {
    return absl::InvalidArgumentError(
        "has_finding_per_page is true; copy the words out and ask DescribeDemoteFinding");
  }
  CRUMB_ASSIGN_OR_RETURN(const uint64_t finding, gpu::TakeWord(params.finding, stream));
  return DescribeDemoteFinding(params, finding);
}

}  // namespace crumb
