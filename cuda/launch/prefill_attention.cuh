// SPDX-License-Identifier: Apache-2.0
//
// One head_dim's launch of prefill attention, for a .cu file to instantiate.
#pragma once

#include "cuda/kernels/prefill_attention.cuh"
#include "cuda/launch/prefill_attention.h"

namespace crumb::gpu {

template <int kDim>
int LaunchPrefill(const PrefillAttentionParams& params, CUstream_st* stream) {
  const auto kernel = PrefillAttentionKernel<kDim>;
  constexpr size_t kBytes = sizeof(PrefillShared<kDim>);
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  if (error != cudaSuccess) {
    return error;
  }
  const uint32_t rows = params.num_queries * (params.num_query_heads / params.num_kv_heads);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((rows + kPrefillRows - 1) / kPrefillRows, params.num_kv_heads);
  config.blockDim = dim3(kPrefillThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace crumb::gpu
