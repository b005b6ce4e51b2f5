// SPDX-License-Identifier: Apache-2.0
//
// Attention of rows of queries (sequences x heads of a group) to the pages of a prefix that they
// all share. Bound by the tensor cores in principle: a head block of head_dim 128 is 2.1 MFLOP for
// 64 rows. On an H200 it is bound by issuing what surrounds them, about 500 instructions a warp and
// page.
//
// grid = [num_splits, row blocks, KV heads]. Warpgroups take turns with a block's pages, so that
// some multiply while others are at their softmax; there are as many as registers allow.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/kernels/decode_merge.cuh"
#include "cuda/kernels/decode_queries.cuh"
#include "cuda/kernels/page_ring.cuh"
#include "cuda/kernels/prefix_group.cuh"
#include "cuda/kernels/ptx.cuh"
#include "cuda/launch/shared_prefix.h"

namespace crumb::gpu {

// Row r of the queries as a B operand: element k of core 2 (2 step + part) + half is channel
// 32 step + 16 half + 4 (k / 2) + 2 (k % 2) + part, as bytes of K's words have it; the upper half
// comes sixteen times too large from the codes, so its queries are divided by that. By one warp.
template <int kHeadDim, int kRows, int kGroups>
__device__ __forceinline__ void StoreSharedQuery(const RawQuery<kHeadDim>& raw,
                                                 ElementType type,
                                                 int r,
                                                 int lane,
                                                 PrefixShared<kHeadDim, kRows, kGroups>& shared) {
  using Shared = PrefixShared<kHeadDim, kRows, kGroups>;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < RawQuery<kHeadDim>::kChunksOfLane; ++i) {
    const int chunk = lane + 32 * i;  // Of four channels.
    const float4 four = raw.Get(i, type);
    const float values[4] = {four.x, four.y, four.z, four.w};
    const int step = chunk / 8;
    const int half = chunk % 8 / 4;
    if (chunk < RawQuery<kHeadDim>::kChunks) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const __half2 pair = __floats2half2_rn(values[part], values[part + 2]);
        sum += __low2float(pair) + __high2float(pair);
        const __half2 scaled = half == 0 ? pair : __hmul2(pair, __float2half2_rn(1.0f / 16));
        *reinterpret_cast<__half2*>(shared.queries +
                                    ((step * 2 + part) * 2 + half) * Shared::kQueryStride +
                                    r / 8 * 128 + r % 8 * 16 + chunk % 4 * 4) = scaled;
      }
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    sum += __shfl_xor_sync(kFullWarp, sum, step);
  }
  if (lane < kGroups) {
    float* column = &shared.columns[lane][r / 2].x + r % 2 * 2;
    column[0] = sum;
    column[1] = -kNoMaximum;
    shared.highest[lane][r] = Ordered(kNoMaximum);
  }
}

template <int kHeadDim, int kRows, int kGroups>
__device__ __forceinline__ void LoadSharedQueries(const SplitDecodeParams& batch,
                                                  int first_row,
                                                  int head,
                                                  PrefixShared<kHeadDim, kRows, kGroups>& shared) {
  using Shared = PrefixShared<kHeadDim, kRows, kGroups>;
  constexpr int kWarps = kGroups * kThreadsOfGroup / 32;
  constexpr int kBatch = 4;  // Rows whose loads are on their way together.
  const uint32_t group = batch.num_query_heads / batch.num_kv_heads;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int first = warp; first < kRows; first += kWarps * kBatch) {
    RawQuery<kHeadDim> raw[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const auto row = static_cast<uint32_t>(first_row + first + i * kWarps);
      const uint32_t sequence = row / group;
      raw[i].Load(batch.queries,
                  size_t{sequence} * batch.num_query_heads + static_cast<uint32_t>(head) * group +
                      (row - sequence * group),
                  first + i * kWarps < kRows && row < batch.num_sequences * group, lane);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * kWarps < kRows) {
        StoreSharedQuery<kHeadDim, kRows, kGroups>(raw[i], batch.query_type, first + i * kWarps,
                                                   lane, shared);
      }
    }
  }
}

template <int kHeadDim, int kRows, int kGroups>
__global__ void __launch_bounds__(kGroups* kThreadsOfGroup, 1)
    SharedPrefixKernel(const __grid_constant__ SharedPrefixLaunch launch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) std::byte memory[];
  using Shared = PrefixShared<kHeadDim, kRows, kGroups>;
  auto& shared = *reinterpret_cast<Shared*>(memory);
  const int group = Uniform(static_cast<int>(threadIdx.x) / kThreadsOfGroup);
  const bool is_first_warp = Uniform(static_cast<int>(threadIdx.x) % kThreadsOfGroup / 32) == 0;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first_row = static_cast<int>(blockIdx.y) * kRows;
  const int head = static_cast<int>(blockIdx.z);
  const uint32_t num_pages = min(*launch.prefix_pages, launch.prefix.stride);
  const auto begin = static_cast<int>(uint64_t{num_pages} * blockIdx.x / launch.num_splits);
  const auto end = static_cast<int>(uint64_t{num_pages} * (blockIdx.x + 1) / launch.num_splits);

  // 1. Rings; a warpgroup's pages are every second one. Its first warp looks pages up, 32 at a
  // time.
  WarpRing<kHeadDim> ring(shared.pages[group][0], shared.states[group],
                          is_first_warp ? Shared::kStages : 0, lane);
  ring.SetStages(Shared::kStages);
  const std::byte* found = nullptr;
  int looked_up = begin + group;  // What `found` of lane 0 is.
  const auto look_up = [&](int page) {
    looked_up = page;
    const int mine = page + lane * kGroups;
    found = nullptr;
    if (mine < end) {
      found = launch.prefix.pages[mine];
      if (found == nullptr) {
        auto* findings = static_cast<DecodeFindings*>(launch.batch.workspace);
        atomicOr(&findings->problems, kNullHistoryPage);
      }
    }
  };
  int next = begin + group;
  const auto push = [&] {
    if (next >= end) {
      return;
    }
    if (next >= looked_up + 32 * kGroups) {
      look_up(next);
    }
    const auto* base = reinterpret_cast<const std::byte*>(__shfl_sync(
        kFullWarp, reinterpret_cast<unsigned long long>(found), (next - looked_up) / kGroups));
    const uint64_t offset =
        launch.prefix.block_offset + static_cast<uint64_t>(head) * launch.prefix.head_stride;
    ring.Push({base == nullptr ? nullptr : base + offset, kRowsOfInt2});
    next += kGroups;
  };
  LoadSharedQueries<kHeadDim, kRows, kGroups>(launch.batch, first_row, head, shared);
  if (is_first_warp) {
    look_up(next);
    for (int i = 0; i < Shared::kStages; ++i) {
      push();
    }
  }
  AsyncProxyFence();
  __syncthreads();

  // 2. Page by page.
  PrefixGroup<kHeadDim, kRows, kGroups> attention(shared, launch.batch.scale * 1.4426950408889634f);
  int buffer = 0;
  for (int page = begin + group; page < end; page += kGroups) {
    int rows;
    const std::byte* stage = ring.Front(&rows);
    if (Uniform(rows) != kRowsOfNothing) {
      attention.StartScores(stage);
      attention.MakeWeights(stage, buffer);
      attention.AddOutputs(stage, buffer);
      buffer ^= 1;
    } else {
      GroupBarrierAny(group, false);
    }
    // All warps are done with the stage before this one, since they passed this page's barrier.
    if (is_first_warp && page > begin + group) {
      push();
    }
    ring.Pop();
  }
  attention.Finish(launch, first_row, head);
#endif
}

// One warp a row: the prefix's splits, then the sequence's own part.
__global__ void __launch_bounds__(128)
    SharedMergeKernel(const __grid_constant__ SharedPrefixLaunch launch) {
  const SplitDecodeParams& batch = launch.batch;
  const size_t num_rows = size_t{batch.num_sequences} * batch.num_query_heads;
  const size_t row = size_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  if (row >= num_rows) {
    return;
  }
  const auto* sums = reinterpret_cast<const float2*>(launch.sums);
  const float own_max = launch.own_lse[row] * 1.4426950408889634f;
  float highest = own_max;
  for (uint32_t split = lane; split < launch.num_splits; split += 32) {
    const float2 part = sums[split * num_rows + row];
    highest = part.y > 0 ? fmaxf(highest, part.x) : highest;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, step));
  }
  for (uint32_t channel = lane * 4; channel < batch.head_dim; channel += 128) {
    const float own_share = ShareOf(own_max, highest);
    float4 out =
        *reinterpret_cast<const float4*>(launch.own_outputs + row * batch.head_dim + channel);
    out = make_float4(out.x * own_share, out.y * own_share, out.z * own_share, out.w * own_share);
    float sum = own_share;
#pragma unroll 4
    for (uint32_t split = 0; split < launch.num_splits; ++split) {
      const size_t place = split * num_rows + row;
      const float2 part = sums[place];
      const float share = part.y > 0 ? Exp2(part.x - highest) : 0.0f;
      const float4 v =
          *reinterpret_cast<const float4*>(launch.outputs + place * batch.head_dim + channel);
      if (part.y > 0) {
        out.x = fmaf(share, v.x, out.x);
        out.y = fmaf(share, v.y, out.y);
        out.z = fmaf(share, v.z, out.z);
        out.w = fmaf(share, v.w, out.w);
        sum = fmaf(share, part.y, sum);
      }
    }
    StoreResult(batch, row, static_cast<int>(channel), out, highest, sum);
  }
}

}  // namespace crumb::gpu
