// SPDX-License-Identifier: Apache-2.0
//
// Pages of a shared prefix as tiles of fp16 (see code_tiles.cuh) in shared memory, and the ring
// that hands them from the warpgroups that make them to those that multiply.
//
// A key is s (c - 1) + (m + s), with its token's scale s and minimum m: its element of a tile is
// s (c - 1), which fp16 holds exactly, and m + s is left to the sum of the query. A value's element
// is s c, made by way of 16 s. Two more rows of V's tile are ones and the tokens' minima, so that
// the products with V give the sums of weights and of weighted minima too.
//
// fp16 ends at 65504. Where a page has a scale of K that is 4096 or more, the elements of its K are
// a 32nd of what they would be, and scores are multiplied by 32; so are those of V, by weights that
// are as many times larger.
#pragma once

#include <cstdint>

#include "cuda/kernels/code_tiles.cuh"
#include "cuda/kernels/ptx.cuh"

namespace crumb::gpu {

inline constexpr int kPrefixProducers = 2;  // Warpgroups that make tiles, a half of each.
inline constexpr int kPrefixGroups = 2;     // Warpgroups that multiply, of 64 rows.
inline constexpr int kPrefixGroupRows = 64;
inline constexpr uint32_t kPrefixSumRows = 8;    // Of V's tile: ones, minima, zeros.
inline constexpr uint32_t kLargeScale = 0x6c00;  // 4096 in fp16.
inline constexpr float kShrink = 1.0f / 32;
inline constexpr float kGrowth = 5;  // 2^5 takes it back.

// One page.
template <int kDim>
struct PrefixStage {
  alignas(1024) std::byte keys[kPageTokens * kDim * 2];     // [64 channels a block][token]
  std::byte values[(kDim + kPrefixSumRows) * kSwizzleRow];  // [channel, then sums][64 tokens]
  // Of each token, m + s of K; NaN of a page that is not there.
  alignas(16) float key_offsets[kPageTokens];
  float2 growth;  // What to multiply scores by, and what to add to the exponents of weights.
};

template <int kDim>
struct PrefixShared {
  static constexpr uint32_t kStages = kDim == 256 ? 2 : 6;
  static constexpr uint32_t kPages = kDim == 256 ? 2 : 4;  // On their way, as they are in memory.
  // Where registers are too few for them: [group][64 channels a block][row].
  static constexpr int kQueryBytes = kDim == 256 ? kPrefixGroups * kPrefixGroupRows * kDim * 2 : 0;

  PrefixStage<kDim> stages[kStages];
  alignas(1024) std::byte queries[kQueryBytes + 16];
  alignas(128) std::byte pages[kPages][Int2HeadBlock{kDim, kDim}.bytes()];
  uint64_t page_is_there[kPages];
  uint64_t page_is_read[kPages];
  uint64_t full[kStages];
  uint64_t empty[kStages];

  // By one warpgroup. `readers`: threads that give a stage back.
  __device__ __forceinline__ void Init(uint32_t thread, uint32_t readers) {
    if (thread == 0) {
      for (uint32_t i = 0; i < kStages; ++i) {
        BarrierInit(&full[i], kPrefixProducers * kWarpgroupThreads);
        BarrierInit(&empty[i], readers);
      }
      for (uint32_t i = 0; i < kPages; ++i) {
        BarrierInit(&page_is_there[i], 32);
        BarrierInit(&page_is_read[i], kPrefixProducers * kWarpgroupThreads);
      }
      BarrierInitFence();
    }
    for (uint32_t i = thread; i < kStages * kPrefixSumRows * 8; i += kWarpgroupThreads) {
      StoreTileChunk(stages[i / 8 / kPrefixSumRows].values + kDim * kSwizzleRow,
                     i / 8 % kPrefixSumRows, i % 8, make_uint4(0, 0, 0, 0));
    }
  }
};

// Which of a ring's stages, and in which round.
template <uint32_t kStages>
struct RingPlace {
  uint32_t stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Advance(uint32_t step) {
    stage += step;
    if (stage >= kStages) {
      stage -= kStages;
      parity ^= 1;
    }
  }
};

}  // namespace crumb::gpu
