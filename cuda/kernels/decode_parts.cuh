// SPDX-License-Identifier: Apache-2.0
//
// What a block has of a pair (sequence, KV head), and how blocks that share one hand their parts
// through the workspace to the last of them. Sums are taken in the order of blocks, so they are the
// same each time. All of it is on the way of a single sequence's step and runs once a launch: it is
// short, and lanes share what would be the same in all of them.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "cuda/kernels/decode_merge.cuh"
#include "cuda/kernels/relaxed.cuh"
#include "cuda/kernels/work_share.cuh"
#include "cuda/launch/decode_workspace.h"

namespace crumb::gpu {

static_assert(kMaxWarps <= static_cast<int>(HalfWarp::kLanes), "a lane for each warp's state");

// What the block that merges a pair has of it, until it has the others' parts.
template <int kHeadDim, int kTiles>
struct OwnPart {
  RowSum parts[kTiles * kHeadsOfTile * (kHeadDim / 4)];
};

// A pair (sequence, KV head), and the blocks that have a part of it.
struct PairTarget {
  size_t query_row = 0;
  uint32_t group = 0;  // Query heads.
  uint32_t first_block = 0;
  uint32_t last_block = 0;

  __device__ __forceinline__ bool is_whole() const { return first_block == last_block; }
};

// No word of a part is zero.
__device__ __forceinline__ float NotZero(float x) {
  return __float_as_uint(x) == 0 ? -0.0f : x;
}
__device__ __forceinline__ bool IsThere(float4 x) {
  return min(min(__float_as_uint(x.x), __float_as_uint(x.y)),
             min(__float_as_uint(x.z), __float_as_uint(x.w))) != 0;
}
__device__ __forceinline__ bool IsThere(float2 x) {
  return min(__float_as_uint(x.x), __float_as_uint(x.y)) != 0;
}

// Where the parts of four channels of a head lie in the workspace, from that of `block` on.
template <int kHeadDim, int kTiles>
struct PartPlaces {
  static constexpr uint32_t kHeads = kTiles * kHeadsOfTile;
  static constexpr uint32_t kChunks = kHeadDim / 4;
  static constexpr uint32_t kSums = DecodeWorkspace::SumsOf(kHeadDim);
  // From a block to the next.
  static constexpr int kOutputStride = kHeads * kChunks;
  static constexpr uint32_t kSumStride = kHeads * kSums;

  float4* outputs;
  float2* sums;  // (maximum, sum)

  __device__ __forceinline__
  PartPlaces(const DecodeLaunch& launch, uint32_t block, uint32_t head, uint32_t chunk)
      : outputs(reinterpret_cast<float4*>(launch.part_outputs) +
                ((block * kHeads + head) * kChunks + chunk)),
        sums(reinterpret_cast<float2*>(launch.part_sums) +
             ((block * kHeads + head) * kSums + chunk / 32)) {}

  __device__ __forceinline__ void Store(const RowSum& part, uint32_t chunk) const {
    StoreRelaxed(outputs, make_float4(NotZero(part.out.x), NotZero(part.out.y), NotZero(part.out.z),
                                      NotZero(part.out.w)));
    if (chunk % 32 == 0) {
      StoreRelaxed(sums, make_float2(NotZero(part.highest), NotZero(part.sum)));
    }
  }
};

// Adds up what the warps left of a pair: to the outputs if the block has all of it, to `own` if it
// is the one to merge it (the last), else to its place in the workspace. By all threads.
template <int kHeadDim, int kTiles>
__device__ __forceinline__ void MergeWarps(const DecodeLaunch& launch,
                                           const MergeStorage<kHeadDim, kTiles>& storage,
                                           uint32_t num_warps,
                                           const PairTarget& target,
                                           OwnPart<kHeadDim, kTiles>& own) {
  constexpr uint32_t kChunks = kHeadDim / 4;
  const uint32_t block = launch.block();
  for (uint32_t i = threadIdx.x; i < target.group * kChunks; i += blockDim.x) {
    const uint32_t head = i / kChunks;
    const uint32_t chunk = i % kChunks;
    const RowSum part = MergeRows(storage, num_warps, head, chunk);
    if (target.is_whole()) {
      StoreResult(launch.params, target.query_row + head, chunk * 4, part.out, part.highest,
                  part.sum);
    } else if (block == target.last_block) {
      own.parts[i] = part;
    } else {
      PartPlaces<kHeadDim, kTiles>(launch, block, head, chunk).Store(part, chunk);
    }
  }
}

// How long a block waits for another's part. It comes within microseconds of this block's own; only
// if lengths change while a launch runs, or two launches share a workspace, does it never come.
inline constexpr uint64_t kPatienceNs = 10'000'000'000;

class Patience {
 public:
  __device__ __forceinline__ bool IsOver() {
    if (++tries_ % 1024 != 0) {
      return false;
    }
    const uint64_t now = DeviceNanoseconds();
    begin_ = begin_ == 0 ? now : begin_;
    return now - begin_ > kPatienceNs;
  }

 private:
  uint32_t tries_ = 0;
  uint64_t begin_ = 0;
};

// Parts of neighbouring blocks: the outputs of all of them, and the maximum and sum of the one that
// has this lane of a half warp.
template <int kHeadDim, int kTiles>
struct PartBatch {
  using Places = PartPlaces<kHeadDim, kTiles>;
  static constexpr uint32_t kSize =
      HalfWarp::kLanes;  // At most; all loads are on their way together.
  float4 values[kSize];
  float2 sums;

  // Waits until `count` parts have come, and leaves zeros instead. By whole half warps.
  __device__ __forceinline__ void Take(const DecodeLaunch& launch,
                                       const Places& places,
                                       uint32_t count) {
    float2* my_sums = places.sums + HalfWarp::lane() * Places::kSumStride;
    const bool has_part = HalfWarp::lane() < count;
    Patience patience;
    bool is_there;
    do {
      sums = has_part ? LoadRelaxed(my_sums) : make_float2(-INFINITY, 1);
      ForEach([&](auto j) {
        values[j] = j < count ? LoadRelaxed<j * Places::kOutputStride>(places.outputs)
                              : make_float4(1, 1, 1, 1);
      });
      is_there = IsThere(sums);
      ForEach([&](auto j) { is_there = is_there & IsThere(values[j]); });
      if (!is_there && patience.IsOver()) [[unlikely]] {
        atomicOr(&FindingsOf(launch.params)->problems, kPartMissing);
        break;
      }
    } while (!is_there);
    ForEach([&](auto j) {
      if (j < count) {
        StoreRelaxed<j * Places::kOutputStride>(places.outputs, make_float4(0, 0, 0, 0));
      }
    });
    // The sums are also another half warp's, if that has channels of the same head.
    __syncwarp(Places::kChunks < 32 ? HalfWarp::mask() : kFullWarp);
    if (has_part) {
      StoreRelaxed(my_sums, make_float2(0, 0));
    }
  }

  __device__ __forceinline__ RowSum Sum() const {
    RowSum total;
    const float share = total.Start(sums.x, sums.y);
#pragma unroll
    for (uint32_t j = 0; j < kSize; ++j) {
      total.Add(HalfWarp::Of(share, j), values[j]);
    }
    return total;
  }

 private:
  // Calls function(j) with constants.
  template <typename Function>
  __device__ __forceinline__ static void ForEach(Function&& function) {
    [&]<int... kJ>(std::integer_sequence<int, kJ...>) {
      (function(std::integral_constant<int, kJ>()), ...);
    }
    (std::make_integer_sequence<int, static_cast<int>(kSize)>());
  }
};

// By the last block that has a part of a pair: the others' parts and its own. By all threads.
// Blocks wait only for earlier ones, which the device starts first.
template <int kHeadDim, int kTiles>
__device__ __forceinline__ void MergeBlocks(const DecodeLaunch& launch,
                                            const MergeStorage<kHeadDim, kTiles>& storage,
                                            uint32_t num_warps,
                                            const PairTarget& target,
                                            const OwnPart<kHeadDim, kTiles>& own) {
  using Batch = PartBatch<kHeadDim, kTiles>;
  using Places = PartPlaces<kHeadDim, kTiles>;
  constexpr uint32_t kChunks = Places::kChunks;
  constexpr uint32_t kItems = Places::kHeads * kChunks;
  const uint32_t num_parts = target.last_block - target.first_block;
  const auto finish = [&](uint32_t head, uint32_t chunk, RowSum total) {
    total.Add(own.parts[head * kChunks + chunk]);  // It was this thread that left it.
    StoreResult(launch.params, target.query_row + head, chunk * 4, total.out, total.highest,
                total.sum);
  };
  // Where one batch is not all, groups of threads take turns with batches.
  const uint32_t num_groups =
      num_parts <= Batch::kSize ? 1 : min(num_warps, max(1u, blockDim.x / kItems));
  if (num_groups > 1) {
    __syncthreads();  // All are done with what the storage held.
  }
  for (uint32_t i = threadIdx.x; i < kItems * num_groups; i += blockDim.x) {
    const uint32_t turn = i / kItems;
    const uint32_t head = i % kItems / kChunks;
    const uint32_t chunk = i % kChunks;
    if (head >= target.group) {
      continue;
    }
    RowSum total;
#pragma unroll 1
    for (uint32_t part = turn * Batch::kSize; part < num_parts; part += num_groups * Batch::kSize) {
      Batch batch;
      batch.Take(launch, Places(launch, target.first_block + part, head, chunk),
                 min(num_parts - part, Batch::kSize));
      total.Add(batch.Sum());
    }
    if (num_groups == 1) {
      finish(head, chunk, total);
    } else {
      *storage.Output4(turn, head, chunk) = total.out;
      storage.maxima[turn * Places::kHeads + head] = total.highest;  // By all chunks the same.
      storage.sums[turn * Places::kHeads + head] = total.sum;
    }
  }
  if (num_groups > 1) {
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < target.group * kChunks; i += blockDim.x) {
      finish(i / kChunks, i % kChunks, MergeRows(storage, num_groups, i / kChunks, i % kChunks));
    }
  }
}

}  // namespace crumb::gpu
