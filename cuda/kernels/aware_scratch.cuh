// SPDX-License-Identifier: Apache-2.0
//
// Errors of a warp that rounds rows with feedback, in shared memory: 32 rows in two ranges, 64
// problems. A lane has one row, whose ranges are the halves of a word. Half of the channels at a
// time: when the first half is done, what its errors bring to the second takes their place.
//
// [channel][64 problems] fp16, 16 bytes of padding a channel: so neither lanes that write their
// words of a channel nor matrices that are loaded (8 channels x 8 problems) meet a bank twice.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/kernels/packed.cuh"
#include "cuda/kernels/page_rows.cuh"

namespace crumb::gpu {

inline constexpr int kRangesOfRow = 2;
inline constexpr int kProblemChunks = 8;  // Of eight problems, a warp's.

template <int kDim>
struct AwareScratch {
  static constexpr int kChannelBytes = 128 + 16;
  static constexpr int kBlocks = kDim / 32;  // Of 16 channels, in a half.
  alignas(16) std::byte errors[kDim / 2 * kChannelBytes];

  // Address in shared memory of what a block of the half has; what follows is apart by constants.
  __device__ __forceinline__ uint32_t base(int block) const {
    return SharedAddress(errors) + static_cast<uint32_t>(block * 16 * kChannelBytes);
  }
  // The lane's two problems of channel `i` of the block.
  static __device__ __forceinline__ uint32_t Word(uint32_t base, int i, int lane) {
    return base + lane * 4 + i * kChannelBytes;
  }
  // What a product's sums are, of the problems of chunks 2 `pair` and 2 `pair` + 1: two of channel
  // g and of channel g + 8, those of lane 4 chunk + t.
  static __device__ __forceinline__ void LoadSums(uint32_t (&sums)[kProblemChunks][2],
                                                  uint32_t base,
                                                  int lane) {
#pragma unroll
    for (int pair = 0; pair < kProblemChunks / 2; ++pair) {
      uint32_t words[4];
      LoadTile(words, base + pair * 32, kChannelBytes, lane);
      sums[2 * pair][0] = words[0];
      sums[2 * pair][1] = words[1];
      sums[2 * pair + 1][0] = words[2];
      sums[2 * pair + 1][1] = words[3];
    }
  }
  static __device__ __forceinline__ void StoreSums(const uint32_t (&sums)[kProblemChunks][2],
                                                   uint32_t base,
                                                   int lane) {
#pragma unroll
    for (int pair = 0; pair < kProblemChunks / 2; ++pair) {
      const uint32_t words[4] = {sums[2 * pair][0], sums[2 * pair][1], sums[2 * pair + 1][0],
                                 sums[2 * pair + 1][1]};
      StoreTile(words, base + pair * 32, kChannelBytes, lane);
    }
  }
  // B[16 x 16] of m16n8k16, twice: all the block's channels, of the problems of chunks 2 `pair` and
  // 2 `pair` + 1.
  static __device__ __forceinline__ void LoadOperands(uint32_t (&b)[4],
                                                      uint32_t base,
                                                      int pair,
                                                      int lane) {
    LoadMatricesTransposed(b, base + lane % 16 * kChannelBytes + lane / 16 * 16 + pair * 32);
  }
};

}  // namespace crumb::gpu
