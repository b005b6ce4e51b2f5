// SPDX-License-Identifier: Apache-2.0
//
// Pages of a shared prefix as tiles of fp16 (see code_tiles.cuh) in shared memory, and the ring
// that hands them from the warpgroups that make them to those that multiply.
//
// A key is s (c - 1) + (m + s), with its token's scale s and minimum m: its element of a tile is
// s (c - 1), which fp16 holds exactly, and m + s is left to the sum of the query. A value's element
// is s c; it is made by way of 16 s, so s must be below 4094. Two more rows of V's tile are ones
// and the tokens' minima, so that the products with V give the sums of weights and of weighted
// minima too.
#pragma once

#include <cstdint>

#include "cuda/kernels/code_tiles.cuh"
#include "cuda/kernels/ptx.cuh"

namespace crumb::gpu {

inline constexpr int kPrefixProducers = 2;  // Warpgroups that make tiles, a half of each.
inline constexpr int kPrefixGroups = 2;     // Warpgroups that multiply, of 64 rows.
inline constexpr int kPrefixGroupRows = 64;
inline constexpr uint32_t kPrefixSumRows = 8;  // Of V's tile: ones, minima, zeros.

// One page.
template <int kDim>
struct PrefixStage {
  alignas(1024) std::byte keys[kPageTokens * kDim * 2];     // [64 channels a block][token]
  std::byte values[(kDim + kPrefixSumRows) * kSwizzleRow];  // [channel, then sums][64 tokens]
  // Of each token, m + s of K in base-2 exponents; NaN of a page that is not there.
  alignas(16) float key_offsets[kPageTokens];
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
      const uint32_t row = i / 8 % kPrefixSumRows;
      const uint32_t word = row == 0 ? 0x3c003c00u : 0u;
      StoreTileChunk(stages[i / 8 / kPrefixSumRows].values + kDim * kSwizzleRow, row, i % 8,
                     make_uint4(word, word, word, word));
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
