// SPDX-License-Identifier: Apache-2.0
//
// One head_dim's launches of demotion, for a .cu file to instantiate.
#pragma once

#include <algorithm>

#include "cuda/kernels/demote_aware.cuh"
#include "cuda/launch/demote_pages.h"

namespace crumb::gpu {

inline uint32_t NumDemoteUnits(const DemotePagesParams& params) {
  return params.num_pages * params.num_layers * params.num_heads * 2;
}

template <typename Kernel>
int LaunchDemoteKernel(Kernel kernel,
                       const DemotePagesParams& params,
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
  config.gridDim = dim3(std::min(blocks, NumDemoteUnits(params)));
  config.blockDim = dim3(static_cast<uint32_t>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, params);
}

// oscar-int2.
template <int kDim, typename Rotation>
int LaunchDemoteNearest(const DemotePagesParams& params,
                        uint32_t num_multiprocessors,
                        CUstream_st* stream) {
  // Shares take unequal time, so each multiprocessor has several, but none so short that loading
  // its matrices counts.
  constexpr uint32_t kUnitsOfShare = 32;
  const uint32_t at_a_time = num_multiprocessors * Rotation::kBlocks;
  const uint32_t turns = std::max(NumDemoteUnits(params) / (at_a_time * kUnitsOfShare), 1u);
  return LaunchDemoteKernel(DemoteKernel<kDim, Rotation>, params, turns * at_a_time,
                            32 * Rotation::kWarps, sizeof(DemoteShared<kDim, Rotation>), stream);
}

template <int kDim, bool kTilted>
int LaunchDemoteAware(const DemotePagesParams& params,
                      uint32_t num_multiprocessors,
                      CUstream_st* stream) {
  return LaunchDemoteKernel(
      DemoteAwareKernel<kDim, kTilted>, params, num_multiprocessors * kDemoteAwareBlocks<kDim>,
      32 * RotateByWarps<kDim>::kWarps, sizeof(DemoteAwareShared<kDim, kTilted>), stream);
}

template <int kDim>
int LaunchDemote(const DemotePagesParams& params,
                 bool has_warpgroups,
                 uint32_t num_multiprocessors,
                 CUstream_st* stream) {
  if (params.heads.is_aware) {
    return params.heads.is_tilted
               ? LaunchDemoteAware<kDim, true>(params, num_multiprocessors, stream)
               : LaunchDemoteAware<kDim, false>(params, num_multiprocessors, stream);
  }
  if constexpr (kDim <= 128) {
    if (has_warpgroups) {
      return LaunchDemoteNearest<kDim, RotateByWarpgroup<kDim>>(params, num_multiprocessors,
                                                                stream);
    }
  }
  return LaunchDemoteNearest<kDim, RotateByWarps<kDim>>(params, num_multiprocessors, stream);
}

}  // namespace crumb::gpu
