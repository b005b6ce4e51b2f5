// SPDX-License-Identifier: Apache-2.0
//
// Prefill attention on warpgroup products (compute capability 9.0): what prefill_attention.cuh does
// by smaller ones.
//
// grid = [groups of 128 rows, KV heads]; a row is a (query token, query head) pair of the KV head,
// heads fastest, so a tile of K and V serves all heads of the group. Two warpgroups multiply 64
// rows each; the third makes pages into tiles, up to four ahead. A tile of head_dim 128 is 1024
// cycles of the tensor cores; to unpack it is about 110 instructions a warp of the third.
#pragma once

#include <cstdint>

#include "cuda/kernels/null_pages.cuh"
#include "cuda/kernels/prefill_group.cuh"
#include "cuda/kernels/prefill_pages.cuh"

namespace crumb::gpu {

inline constexpr int kPrefillBlockRows = kPrefillGroups * kPrefillGroupRows;
inline constexpr int kPrefillBlockThreads = (kPrefillGroups + 1) * kWarpgroupThreads;

template <int kDim>
__global__ __launch_bounds__(kPrefillBlockThreads, 1) void PrefillWarpgroupsKernel(
    const __grid_constant__ PrefillAttentionParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) std::byte prefill_memory[];
  auto& ring = *reinterpret_cast<PrefillRing<kDim>*>(prefill_memory);
  const uint32_t group = params.num_query_heads / params.num_kv_heads;
  const uint32_t first_row = blockIdx.x * kPrefillBlockRows;
  const uint32_t last_row = min(first_row + kPrefillBlockRows, params.num_queries * group) - 1;
  const uint32_t seen = params.window_tokens - params.num_queries + last_row / group + 1;
  const uint32_t num_tiles = params.history_pages + (seen + kPageTokens - 1) / kPageTokens;
  if (threadIdx.x == 0) {
    ring.Init();
  }
  CountNullPages(params);
  __syncthreads();
  const uint32_t role = __shfl_sync(kFullWarp, threadIdx.x / kWarpgroupThreads, 0);
  if (role == 0) {
    ShrinkRegisters<88>();
    PrefillProducer<kDim>(params, ring, num_tiles).Run();
  } else {
    GrowRegisters<208>();
    PrefillGroup<kDim>(params, ring, first_row + (role - 1) * kPrefillGroupRows).Run(num_tiles);
  }
#else
  __trap();  // The launcher takes the other form.
#endif
}

}  // namespace crumb::gpu
