// SPDX-License-Identifier: Apache-2.0
//
// Errors of a warp that rounds rows with feedback, in shared memory: sixteen rows in four ranges,
// 64 problems. A lane has two of them, of one row, as the halves of a word: lane row + 16 p has the
// ranges 2 p and 2 p + 1.
//
// [channel][64 problems] fp16, 128 bytes a channel. The 16-byte chunks of a channel are permuted,
// chunk c of channel i to c ^ (i % 8), so that neither lanes that write their words of a channel
// nor matrices that are loaded (8 channels x 8 problems) meet a bank twice.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/kernels/packed.cuh"
#include "cuda/kernels/page_rows.cuh"

namespace crumb::gpu {

inline constexpr int kProblemsOfLane = 2;

template <int kDim>
struct AwareScratch {
  static constexpr int kChannelBytes = 128;
  alignas(128) std::byte errors[kDim * kChannelBytes];

  // Addresses in shared memory of what a lane has of channels 16 `block` on; those of other
  // channels and chunks follow by constants.
  __device__ __forceinline__ uint32_t base(int block) const {
    return SharedAddress(errors) + static_cast<uint32_t>(block * 16 * kChannelBytes);
  }
  // The lane's two problems of channel `i` of the block.
  static __device__ __forceinline__ uint32_t Word(uint32_t base, int i, int lane) {
    return ((base + lane * 4) ^ (i % 8 << 4)) + i * kChannelBytes;
  }
  // Two problems of channel g + 8 half, as a product's lane (g, t) has them: those of lane
  // 4 chunk + t.
  static __device__ __forceinline__ uint32_t SumWord(uint32_t base, int chunk, int half, int lane) {
    const int g = lane / 4;
    return ((base + g * (kChannelBytes + 16) + lane % 4 * 4) ^ (chunk << 4)) +
           half * 8 * kChannelBytes;
  }
  // B[16 x 16] of m16n8k16, twice: all the block's channels, of the problems of chunks 2 `pair` and
  // 2 `pair` + 1.
  static __device__ __forceinline__ void LoadOperands(uint32_t (&b)[4],
                                                      uint32_t base,
                                                      int pair,
                                                      int lane) {
    const int r = lane % 8;
    const uint32_t row = base + (lane / 8 % 2 * 8 + r) * kChannelBytes + ((lane / 16 ^ r) << 4);
    LoadMatricesTransposed(b, row ^ (pair << 5));
  }
};

}  // namespace crumb::gpu
