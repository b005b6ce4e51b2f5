// SPDX-License-Identifier: Apache-2.0
//
// One head_dim's launch of demotion, for a .cu file to instantiate.
#pragma once

#include <algorithm>

#include "cuda/kernels/demote.cuh"
#include "cuda/launch/demote_pages.h"

namespace crumb::gpu {

template <int kDim, KeyRounding kKeys>
int LaunchDemoteForm(const DemotePagesParams& params,
                     uint32_t num_multiprocessors,
                     CUstream_st* stream) {
  const auto kernel = DemoteKernel<kDim, kKeys>;
  constexpr size_t kBytes = sizeof(DemoteShared<kDim, kKeys>);
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  if (error != cudaSuccess) {
    return error;
  }
  const uint32_t units = params.num_pages * params.num_layers * params.num_heads * 2;
  const uint32_t blocks = std::min(units, num_multiprocessors * kDemoteBlocks<kDim, kKeys>);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(32 * kDemoteWarps<kDim>);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, params);
}

template <int kDim>
int LaunchDemote(const DemotePagesParams& params,
                 uint32_t num_multiprocessors,
                 CUstream_st* stream) {
  if (!params.heads.is_aware) {
    return LaunchDemoteForm<kDim, KeyRounding::kToNearest>(params, num_multiprocessors, stream);
  }
  return params.heads.is_tilted
             ? LaunchDemoteForm<kDim, KeyRounding::kTilted>(params, num_multiprocessors, stream)
             : LaunchDemoteForm<kDim, KeyRounding::kAware>(params, num_multiprocessors, stream);
}

}  // namespace crumb::gpu
