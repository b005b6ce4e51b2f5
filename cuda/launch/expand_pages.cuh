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
                       const UnitLine& line,
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
  config.gridDim = dim3(std::min(line.num_units(params.num_layers), blocks));
  config.blockDim = dim3(static_cast<uint32_t>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, params, line);
}

template <int kDim>
int LaunchExpand(const ExpandPagesParams& params,
                 bool has_warpgroups,
                 uint32_t num_multiprocessors,
                 CUstream_st* stream) {
  const UnitLine line = {(params.num_tokens + kPageTokens - 1) / kPageTokens, params.num_heads,
                         PageParts::kKeysAndValues};
  constexpr int kThreads = 32 * kExpandWarps<kDim>;
  if (params.space == ExpandSpace::kRotated) {
    return LaunchExpandKernel(ExpandKernel<kDim, ExpandSpace::kRotated>, params, line,
                              num_multiprocessors * kExpandBlocks<kDim, ExpandSpace::kRotated>,
                              kThreads, sizeof(ExpandShared<kDim, ExpandSpace::kRotated>), stream);
  }
  if constexpr (kDim <= 128) {
    if (has_warpgroups) {
      // Several shares a multiprocessor, but none so short that loading its matrices counts.
      constexpr uint32_t kUnitsOfShare = 32;
      const uint32_t at_a_time = num_multiprocessors * kExpandBackBlocks;
      const uint32_t turns =
          std::max(line.num_units(params.num_layers) / (at_a_time * kUnitsOfShare), 1u);
      return LaunchExpandKernel(ExpandBackKernel<kDim>, params, line, turns * at_a_time,
                                ExpandBackBlock<kDim>::kThreads, sizeof(ExpandBackShared<kDim>),
                                stream);
    }
  }
  return LaunchExpandKernel(ExpandKernel<kDim, ExpandSpace::kModel>, params, line,
                            num_multiprocessors * kExpandBlocks<kDim, ExpandSpace::kModel>,
                            kThreads, sizeof(ExpandShared<kDim, ExpandSpace::kModel>), stream);
}

}  // namespace crumb::gpu
