// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/prefill_attention.h"

#include "cuda/gpu/cuda_status.h"
#include "cuda/launch/prefill_attention.h"
#include "proto/base/status_macros.h"

namespace crumb {

namespace {

gpu::LaunchPrefillAttention FormFor(const GpuDevice& device, uint32_t head_dim) {
  const bool has_warpgroups = device.major == 9;
  switch (head_dim) {
    case 64:
      return has_warpgroups ? gpu::LaunchPrefillWarpgroups64 : gpu::LaunchPrefillAttention64;
    case 128:
      return has_warpgroups ? gpu::LaunchPrefillWarpgroups128 : gpu::LaunchPrefillAttention128;
    default:
      return gpu::LaunchPrefillAttention256;
  }
}

}  // namespace

absl::Status PrefillAttention(const PrefillAttentionParams& params, GpuStream stream) {
  CRUMB_RETURN_IF_ERROR(ValidatePrefillAttention(params));
  CRUMB_ASSIGN_OR_RETURN(const GpuDevice device, CurrentGpu());
  const gpu::LaunchPrefillAttention launch = FormFor(device, params.head_dim);
  return gpu::CudaStatus(launch(params, stream), "launching prefill attention");
}

}  // namespace crumb
