// SPDX-License-Identifier: Apache-2.0
//
// One head_dim's form of split decode, for a .cu file to instantiate.
#pragma once

#include <type_traits>
#include <utility>

#include "cuda/kernels/split_decode.cuh"
#include "cuda/launch/split_decode.h"

namespace crumb::gpu {

// Calls function(std::integral_constant<int, tiles>()), tiles = 1..kMaxTiles.
template <uint32_t kMaxTiles, typename Function>
auto WithTiles(uint32_t tiles, Function&& function) {
  if constexpr (kMaxTiles > 1) {
    if (tiles < kMaxTiles) {
      return WithTiles<kMaxTiles - 1>(tiles, std::forward<Function>(function));
    }
  }
  return function(std::integral_constant<int, static_cast<int>(kMaxTiles)>());
}

template <int kHeadDim, uint32_t kMaxTiles>
struct SplitDecodeLauncher {
  static int MaxWarps(uint32_t tiles) {
    return WithTiles<kMaxTiles>(
        tiles, [](auto constant) { return kMaxThreads<kHeadDim, constant()> / 32; });
  }

  static size_t SharedBytes(uint32_t tiles, int num_warps, int num_stages) {
    return WithTiles<kMaxTiles>(tiles, [&](auto constant) {
      return DecodeShared<kHeadDim, constant()>{num_warps, num_stages}.bytes();
    });
  }

  static int Launch(const SplitDecodeParams& params, const DecodeGrid& grid, CUstream_st* stream) {
    const uint32_t tiles = (grid.heads_of_pass + kHeadsOfTile - 1) / kHeadsOfTile;
    return WithTiles<kMaxTiles>(tiles, [&](auto constant) {
      return grid.team > 1 ? LaunchForm<constant(), true>(params, grid, stream)
                           : LaunchForm<constant(), false>(params, grid, stream);
    });
  }

 private:
  template <int kTiles, bool kTeams>
  static int LaunchForm(const SplitDecodeParams& params,
                        const DecodeGrid& grid,
                        CUstream_st* stream) {
    const auto kernel = SplitDecodeKernel<kHeadDim, kTiles, kTeams>;
    const size_t bytes = DecodeShared<kHeadDim, kTiles>{grid.num_warps, grid.num_stages}.bytes();
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error != cudaSuccess) {
      return error;
    }
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid.num_blocks);
    if constexpr (kTeams) {
      config.gridDim = dim3(grid.team, grid.num_blocks / grid.team);
    }
    config.blockDim = dim3(static_cast<uint32_t>(grid.num_warps) * 32);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = (params.history_is_settled && grid.overlaps) || grid.is_beside ? 1 : 0;
    const DecodeWorkspace workspace{grid.num_blocks, kTiles * kHeadsOfTile, kHeadDim};
    auto* memory = static_cast<std::byte*>(params.workspace);
    const DecodeLaunch launch{params,
                              grid.num_stages,
                              grid.passes,
                              grid.heads_of_pass,
                              params.num_query_heads / params.num_kv_heads,
                              reinterpret_cast<float*>(memory + workspace.sums_offset()),
                              reinterpret_cast<float*>(memory + workspace.outputs_offset()),
                              grid.is_beside};
    return cudaLaunchKernelEx(&config, kernel, launch);
  }
};

template <int kHeadDim, uint32_t kMaxTiles>
constexpr SplitDecodeForm MakeSplitDecodeForm() {
  using Launcher = SplitDecodeLauncher<kHeadDim, kMaxTiles>;
  return {kMaxTiles, Launcher::MaxWarps, Launcher::SharedBytes, Launcher::Launch};
}

}  // namespace crumb::gpu
