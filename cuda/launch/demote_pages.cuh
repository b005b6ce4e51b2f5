// SPDX-License-Identifier: Apache-2.0
//
// One head_dim's launches of demotion, for a .cu file to instantiate.
#pragma once

#include "cuda/kernels/demote.cuh"
#include "cuda/kernels/demote_aware.cuh"
#include "cuda/launch/demote_pages.h"

namespace crumb::gpu {

// `at_a_time` and `units_of_share` as ShareOut has them. `overlaps`: it may begin before the launch
// before it has ended.
template <typename Kernel>
int LaunchDemoteKernel(Kernel kernel,
                       const DemotePagesParams& params,
                       UnitLine line,
                       uint32_t at_a_time,
                       uint32_t units_of_share,
                       int threads,
                       size_t shared_bytes,
                       bool overlaps,
                       CUstream_st* stream) {
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(ShareOut(line, params.num_layers, at_a_time, units_of_share));
  config.blockDim = dim3(static_cast<uint32_t>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = overlaps ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params, line);
}

// Rounded to nearest.
template <int kDim, typename Rotation>
int LaunchDemoteNearest(const DemotePagesParams& params,
                        PageParts parts,
                        bool overlaps,
                        uint32_t num_multiprocessors,
                        CUstream_st* stream) {
  return LaunchDemoteKernel(params.heads.has_deviation ? DemoteKernel<kDim, Rotation, true>
                                                       : DemoteKernel<kDim, Rotation, false>,
                            params, {params.num_pages, params.num_heads, parts},
                            num_multiprocessors * Rotation::kBlocks, 32, 32 * Rotation::kWarps,
                            sizeof(DemoteShared<kDim, Rotation>), overlaps, stream);
}

// Keys, with feedback.
template <int kDim, bool kTilted, bool kWarpgroups>
int LaunchDemoteAware(const DemotePagesParams& params,
                      uint32_t num_multiprocessors,
                      CUstream_st* stream) {
  using Block = DemoteAwareBlock<kDim, kTilted, kWarpgroups>;
  const uint32_t units = (params.num_pages + kAwarePages - 1) / kAwarePages;
  return LaunchDemoteKernel(DemoteAwareKernel<Block>, params,
                            {units, params.num_heads, PageParts::kKeys},
                            num_multiprocessors * Block::kBlocks, 64 * Block::kGroups,
                            Block::kThreads, sizeof(typename Block::Shared), false, stream);
}

template <int kDim, bool kTilted>
int LaunchDemoteAware(const DemotePagesParams& params,
                      bool has_warpgroups,
                      uint32_t num_multiprocessors,
                      CUstream_st* stream) {
  if constexpr (kDim <= 128) {
    if (has_warpgroups) {
      return LaunchDemoteAware<kDim, kTilted, true>(params, num_multiprocessors, stream);
    }
  }
  return LaunchDemoteAware<kDim, kTilted, false>(params, num_multiprocessors, stream);
}

template <int kDim>
int LaunchDemote(const DemotePagesParams& params,
                 bool has_warpgroups,
                 uint32_t num_multiprocessors,
                 CUstream_st* stream) {
  auto parts = PageParts::kKeysAndValues;
  if (params.heads.is_aware) {
    const int error =
        params.heads.is_tilted
            ? LaunchDemoteAware<kDim, true>(params, has_warpgroups, num_multiprocessors, stream)
            : LaunchDemoteAware<kDim, false>(params, has_warpgroups, num_multiprocessors, stream);
    if (error != cudaSuccess) {
      return error;
    }
    parts = PageParts::kValues;
  }
  if constexpr (kDim <= 128) {
    if (has_warpgroups) {
      return LaunchDemoteNearest<kDim, RotateByWarpgroup<kDim>>(
          params, parts, parts == PageParts::kValues, num_multiprocessors, stream);
    }
  }
  return LaunchDemoteNearest<kDim, RotateByWarps<kDim>>(params, parts, false, num_multiprocessors,
                                                        stream);
}

}  // namespace crumb::gpu
