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

#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "cuda/kernels/mma.cuh"

namespace crumb::gpu {

inline constexpr int kRowsOfWarp = 16;
inline constexpr int kProblemsOfLane = 2;

template <int kDim>
struct AwareScratch {
  static constexpr int kChannelBytes = 128;
  alignas(128) std::byte errors[kDim * kChannelBytes];

  __device__ __forceinline__ std::byte* chunk(int channel, int chunk) {
    return errors + channel * kChannelBytes + ((chunk ^ (channel % 8)) << 4);
  }
  // The lane's two problems of a channel.
  __device__ __forceinline__ uint32_t& word(int channel, int lane) {
    return *reinterpret_cast<uint32_t*>(chunk(channel, lane / 4) + lane % 4 * 4);
  }
  // B[16 x 16] of m16n8k16, twice: channels from 16 `step` on, of the problems of chunks 2 `pair`
  // and 2 `pair` + 1.
  __device__ __forceinline__ void LoadOperands(uint32_t (&b)[4], int step, int pair, int lane) {
    LoadMatricesTransposed(b, chunk(16 * step + lane / 8 % 2 * 8 + lane % 8, 2 * pair + lane / 16));
  }
};

__device__ __forceinline__ __half2 AsHalves(uint32_t word) {
  __half2 pair;
  memcpy(&pair, &word, sizeof(pair));
  return pair;
}
__device__ __forceinline__ uint32_t AsWord(__half2 pair) {
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}
// Half `which` of a word, twice.
__device__ __forceinline__ __half2 HalfOf(uint32_t word, int which) {
  return which == 0 ? __low2half2(AsHalves(word)) : __high2half2(AsHalves(word));
}

}  // namespace crumb::gpu
