// SPDX-License-Identifier: Apache-2.0
//
// One head_dim's launch of expansion, for a .cu file to instantiate.
#pragma once

#include <algorithm>

#include "cuda/kernels/expand_back.cuh"
#include "cuda/launch/expand_pages.h"

namespace crumb::gpu {

// `blocks`: as many as a launch of enough units has.
template <typename Kernel>
int LaunchExpandKernel(Kernel kernel,
                       const ExpandPagesParams& params,
                       uint32_t units,
                       uint32_t blocks,
                       int threads,
                       size_t shared_bytes,
                       CUstream_st* stream) {
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error != cudaSuccess) {
    return error;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(std::min(units, blocks));
  config.blockDim = dim3(static_cast<uint32_t>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, params, units);
}

template <int kDim>
int LaunchExpand(const ExpandPagesParams& params,
                 bool has_warpgroups,
                 uint32_t num_multiprocessors,
                 CUstream_st* stream) {
  const uint32_t pages = (params.num_tokens + kPageTokens - 1) / kPageTokens;
  const uint32_t units = pages * params.num_layers * params.num_heads * 2;
  constexpr int kThreads = 32 * kExpandWarps<kDim>;
  if (params.space == ExpandSpace::kRotated) {
    return LaunchExpandKernel(ExpandKernel<kDim, ExpandSpace::kRotated>, params, units,
                              num_multiprocessors * kExpandBlocks<kDim, ExpandSpace::kRotated>,
                              kThreads, sizeof(ExpandShared<kDim, ExpandSpace::kRotated>), stream);
  }
  if constexpr (kDim <= 128) {
    if (has_warpgroups) {
      // Several shares a multiprocessor, but none so short that loading its matrices counts.
      constexpr uint32_t kUnitsOfShare = 32;
      const uint32_t at_a_time = num_multiprocessors * kExpandBackBlocks;
      const uint32_t turns = std::max(units / (at_a_time * kUnitsOfShare), 1u);
      return LaunchExpandKernel(ExpandBackKernel<kDim>, params, units, turns * at_a_time,
                                ExpandBackBlock<kDim>::kThreads, sizeof(ExpandBackShared<kDim>),
                                stream);
    }
  }
  return LaunchExpandKernel(ExpandKernel<kDim, ExpandSpace::kModel>, params, units,
                            num_multiprocessors * kExpandBlocks<kDim, ExpandSpace::kModel>,
                            kThreads, sizeof(ExpandShared<kDim, ExpandSpace::kModel>), stream);
}

}  // namespace crumb::gpu
