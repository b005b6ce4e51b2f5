// SPDX-License-Identifier: Apache-2.0
//
// Attention of rows of queries (sequences x heads of a group) to the pages of a prefix that they
// all share, and the merge of its parts with what each sequence has for itself. A head block of
// head_dim 128 is 1056 cycles of the tensor cores for 128 rows, and as many of shared memory.
//
// Split decode of what sequences have for themselves runs beside it, on the multiprocessors that it
// leaves and when its own blocks have ended: it may start as soon as all of these have waited for
// earlier work.
//
// grid = [num_splits, blocks of 128 rows, KV heads]. Two warpgroups make pages into tiles, two
// multiply. These have 64 rows each; or, where a block has no more than 64, the same rows and every
// second page.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/kernels/decode_merge.cuh"
#include "cuda/kernels/prefix_group.cuh"
#include "cuda/kernels/prefix_pages.cuh"
#include "cuda/kernels/ptx.cuh"
#include "cuda/launch/shared_prefix.h"

namespace crumb::gpu {

inline constexpr int kPrefixThreads = (kPrefixProducers + kPrefixGroups) * kWarpgroupThreads;

// Of a thread; together no more than the block starts with, or warpgroups would wait forever.
inline constexpr int kPrefixProducerRegisters = 48;
inline constexpr int kPrefixGroupRegisters = 208;
static_assert(kPrefixProducers * kPrefixProducerRegisters + kPrefixGroups * kPrefixGroupRegisters <=
              65536 / kPrefixThreads / 8 * 8 * (kPrefixProducers + kPrefixGroups));

template <int kDim>
__global__ void __launch_bounds__(kPrefixThreads, 1)
    SharedPrefixKernel(const __grid_constant__ SharedPrefixLaunch launch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<PrefixShared<kDim>*>(memory);
  const SplitDecodeParams& batch = launch.batch;
  const uint32_t num_rows = batch.num_sequences * (batch.num_query_heads / batch.num_kv_heads);
  const uint32_t first_row = blockIdx.y * kPrefixBlockRows;
  if (!batch.history_is_settled) {
    WaitForEarlierWork();
  }
  const bool takes_turns = PrefixPartsOfSplit(kDim, num_rows, first_row) > 1;
  const uint32_t num_pages = min(*launch.prefix_pages, launch.prefix.stride);
  const auto begin = static_cast<uint32_t>(uint64_t{num_pages} * blockIdx.x / launch.num_splits);
  const auto end =
      static_cast<uint32_t>(uint64_t{num_pages} * (blockIdx.x + 1) / launch.num_splits);
  const uint32_t takers = takes_turns ? kPrefixGroups : 1;
  const uint32_t num_tiles = (end - begin + takers - 1) / takers;
  const uint32_t role = __shfl_sync(kFullWarp, threadIdx.x / kWarpgroupThreads, 0);
  if (role == 0) {
    shared.Init(threadIdx.x, (takes_turns ? 1 : kPrefixGroups) * kWarpgroupThreads);
    AsyncProxyFence();
  }
  __syncthreads();
  if (role < kPrefixProducers) {
    ShrinkRegisters<kPrefixProducerRegisters>();
    PrefixProducer<kDim>(launch, shared, role, begin, end - begin, num_tiles * takers).Run();
  } else {
    GrowRegisters<kPrefixGroupRegisters>();
    WaitForEarlierWork();
    LetNextLaunchStart();
    const uint32_t index = role - kPrefixProducers;
    PrefixGroup<kDim> group(launch, shared, index,
                            first_row + (takes_turns ? 0 : index * kPrefixGroupRows), num_rows,
                            takes_turns ? index : 0, takers);
    group.LoadQueries();
    group.Run(num_tiles);
    group.Store(blockIdx.x * takers + (takes_turns ? index : 0));
  }
#else
  __trap();  // The op refuses other devices.
#endif
}

__device__ __forceinline__ float ShareOf(float max, float highest) {
  return max == -INFINITY ? 0.0f : Exp2(max - highest);
}

inline constexpr uint32_t kMergedAtOnce = 16;  // Parts.

// One warp a row: the prefix's parts, then the sequence's own.
__global__ void __launch_bounds__(128)
    SharedMergeKernel(const __grid_constant__ SharedPrefixLaunch launch) {
  const SplitDecodeParams& batch = launch.batch;
  const size_t num_rows = size_t{batch.num_sequences} * batch.num_query_heads;
  const size_t row = size_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  LetNextLaunchStart();
  WaitForEarlierWork();
  if (row >= num_rows) {
    return;
  }
  if (row == 0 && lane == 0 && *launch.prefix_pages > launch.prefix.stride) {
    atomicOr(&static_cast<DecodeFindings*>(batch.workspace)->problems, kPrefixBeyondTable);
  }
  const uint32_t group = batch.num_query_heads / batch.num_kv_heads;
  const auto row_of_head = static_cast<uint32_t>(row / batch.num_query_heads * group + row % group);
  const uint32_t num_parts =
      launch.num_splits *
      PrefixPartsOfSplit(batch.head_dim, batch.num_sequences * group, row_of_head);
  const auto* sums = reinterpret_cast<const float2*>(launch.sums) + row;
  const float own_max = launch.own_lse[row] * 1.4426950408889634f;
  float highest = own_max;
  for (uint32_t part = lane; part < num_parts; part += 32) {
    const float2 its = sums[part * num_rows];
    highest = its.y > 0 ? fmaxf(highest, its.x) : highest;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, step));
  }
  const float own_share = ShareOf(own_max, highest);
  for (uint32_t first = 0; first < batch.head_dim; first += 128) {
    const uint32_t channel = first + lane * 4;
    const bool has_channel = channel < batch.head_dim;
    const size_t place = row * batch.head_dim + (has_channel ? channel : 0);
    const auto* outputs = reinterpret_cast<const float4*>(launch.outputs + place);
    float4 out = *reinterpret_cast<const float4*>(launch.own_outputs + place);
    out = make_float4(out.x * own_share, out.y * own_share, out.z * own_share, out.w * own_share);
    float sum = own_share;
    for (uint32_t part = 0; part < num_parts; part += kMergedAtOnce) {
      // All loads are on their way before the first is needed.
      float4 values[kMergedAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kMergedAtOnce; ++i) {
        const uint32_t its_part = min(part + i, num_parts - 1);
        values[i] = outputs[its_part * num_rows * (batch.head_dim / 4)];
      }
      const uint32_t mine = min(part + lane % kMergedAtOnce, num_parts - 1);
      const float2 its = sums[mine * num_rows];
      const bool counts = part + lane % kMergedAtOnce < num_parts && its.y > 0;
      const float my_share = counts ? Exp2(its.x - highest) : 0.0f;
      const float my_sum = counts ? its.y : 0.0f;
#pragma unroll
      for (uint32_t i = 0; i < kMergedAtOnce; ++i) {
        const float share = __shfl_sync(kFullWarp, my_share, static_cast<int>(i));
        sum = fmaf(share, __shfl_sync(kFullWarp, my_sum, static_cast<int>(i)), sum);
        if (share > 0) {  // Else its outputs may mean nothing.
          out.x = fmaf(share, values[i].x, out.x);
          out.y = fmaf(share, values[i].y, out.y);
          out.z = fmaf(share, values[i].z, out.z);
          out.w = fmaf(share, values[i].w, out.w);
        }
      }
    }
    if (has_channel) {
      StoreResult(batch, row, channel, out, highest, sum);
    }
  }
}

}  // namespace crumb::gpu
