// SPDX-License-Identifier: Apache-2.0
#include "cuda/kernels/prefill_warpgroups.cuh"
#include "cuda/launch/prefill_attention.h"

namespace crumb::gpu {
namespace {

template <int kDim>
int Launch(const PrefillAttentionParams& params, CUstream_st* stream) {
  const auto kernel = PrefillWarpgroupsKernel<kDim>;
  constexpr int kBytes = sizeof(PrefillRing<kDim>);
  static_assert(kBytes <= 227 * 1024, "more than a block may have");
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) {
    return error;
  }
  const uint32_t rows = params.num_queries * (params.num_query_heads / params.num_kv_heads);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((rows + kPrefillBlockRows - 1) / kPrefillBlockRows, params.num_kv_heads);
  config.blockDim = dim3(kPrefillBlockThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace

int LaunchPrefillWarpgroups64(const PrefillAttentionParams& params, CUstream_st* stream) {
  return Launch<64>(params, stream);
}
int LaunchPrefillWarpgroups128(const PrefillAttentionParams& params, CUstream_st* stream) {
  return Launch<128>(params, stream);
}

}  // namespace crumb::gpu
