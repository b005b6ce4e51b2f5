// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/prefill_attention.h"

#include "cuda/gpu/cuda_status.h"
#include "cuda/launch/prefill_attention.h"
#include "proto/base/status_macros.h"

namespace crumb {

absl::Status PrefillAttention(const PrefillAttentionParams& params, GpuStream stream) {
  CRUMB_RETURN_IF_ERROR(ValidatePrefillAttention(params));
  CRUMB_RETURN_IF_ERROR(CurrentGpu().status());
  const gpu::LaunchPrefillAttention launch = params.head_dim == 64 ? gpu::LaunchPrefillAttention64
                                             : params.head_dim == 128
                                                 ? gpu::LaunchPrefillAttention128
                                                 : gpu::LaunchPrefillAttention256;
  return gpu::CudaStatus(launch(params, stream), "launching prefill attention");
}

}  // namespace crumb
