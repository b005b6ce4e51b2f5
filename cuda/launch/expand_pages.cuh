// SPDX-License-Identifier: Apache-2.0
//
// One head_dim's launch of expansion, for a .cu file to instantiate.
#pragma once

#include "cuda/kernels/expand_back.cuh"
#include "cuda/launch/expand_pages.h"

namespace crumb::gpu {

// `at_a_time` and `units_of_share` as ShareOut has them.
template <typename Kernel>
int LaunchExpandKernel(Kernel kernel,
                       const ExpandPagesParams& params,
                       UnitLine line,
                       uint32_t at_a_time,
                       uint32_t units_of_share,
                       int threads,
                       size_t shared_bytes,
                       CUstream_st* stream) {
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error != cudaSuccess) {
    return error;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(ShareOut(line, params.num_layers, at_a_time, units_of_share));
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
  constexpr uint32_t kOneShare = 0x80000000;  // One for a block, however long.
  if (params.space == ExpandSpace::kRotated) {
    return LaunchExpandKernel(ExpandKernel<kDim, ExpandSpace::kRotated>, params, line,
                              num_multiprocessors * kExpandBlocks<kDim, ExpandSpace::kRotated>,
                              kOneShare, kThreads,
                              sizeof(ExpandShared<kDim, ExpandSpace::kRotated>), stream);
  }
  if constexpr (kDim <= 128) {
    if (has_warpgroups) {
      return LaunchExpandKernel(
          ExpandBackKernel<kDim>, params, line, num_multiprocessors * kExpandBackBlocks, 32,
          ExpandBackBlock<kDim>::kThreads, sizeof(ExpandBackShared<kDim>), stream);
    }
  }
  return LaunchExpandKernel(ExpandKernel<kDim, ExpandSpace::kModel>, params, line,
                            num_multiprocessors * kExpandBlocks<kDim, ExpandSpace::kModel>,
                            kOneShare, kThreads, sizeof(ExpandShared<kDim, ExpandSpace::kModel>),
                            stream);
}

}  // namespace crumb::gpu
