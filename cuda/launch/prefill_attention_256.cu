// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch/prefill_attention.cuh"

namespace crumb::gpu {

int LaunchPrefillAttention256(const PrefillAttentionParams& params, CUstream_st* stream) {
  return LaunchPrefill<256>(params, stream);
}

}  // namespace crumb::gpu
