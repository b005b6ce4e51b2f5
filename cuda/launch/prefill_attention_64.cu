// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch/prefill_attention.cuh"

namespace crumb::gpu {

int LaunchPrefillAttention64(const PrefillAttentionParams& params, CUstream_st* stream) {
  return LaunchPrefill<64>(params, stream);
}

}  // namespace crumb::gpu
