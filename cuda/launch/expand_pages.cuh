// SPDX-License-Identifier: Apache-2.0
//
// One head_dim's launch of expansion, for a .cu file to instantiate.
#pragma once

#include <algorithm>

#include "cuda/kernels/expand.cuh"
#include "cuda/launch/expand_pages.h"

namespace crumb::gpu {

template <int kDim, ExpandSpace kSpace>
int LaunchExpandForm(const ExpandPagesParams& params,
                     uint32_t num_multiprocessors,
                     CUstream_st* stream) {
  const auto kernel = ExpandKernel<kDim, kSpace>;
  constexpr size_t kBytes = sizeof(ExpandShared<kDim, kSpace>);
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  if (error != cudaSuccess) {
    return error;
  }
  const uint32_t pages = (params.num_tokens + kPageTokens - 1) / kPageTokens;
  const uint32_t units = pages * params.num_layers * params.num_heads * 2;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(std::min(units, num_multiprocessors * kExpandBlocks<kDim, kSpace>));
  config.blockDim = dim3(32 * kExpandWarps<kDim>);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, params, units);
}

template <int kDim>
int LaunchExpand(const ExpandPagesParams& params,
                 uint32_t num_multiprocessors,
                 CUstream_st* stream) {
  return params.space == ExpandSpace::kModel
             ? LaunchExpandForm<kDim, ExpandSpace::kModel>(params, num_multiprocessors, stream)
             : LaunchExpandForm<kDim, ExpandSpace::kRotated>(params, num_multiprocessors, stream);
}

}  // namespace crumb::gpu
