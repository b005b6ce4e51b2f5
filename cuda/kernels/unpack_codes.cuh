// SPDX-License-Identifier: Apache-2.0
//
// The codes of a head block, which is in shared memory, to rows: `store(token, channel, word)` gets
// four neighbouring channels of one token in the low two bits of the word's bytes. The bits above
// are other codes.
#pragma once

#include <cstdint>

#include "proto/page/page_format.h"

namespace crumb::gpu {

// K's words of vector `i`, of kDim.
template <int kDim, typename Store>
__device__ __forceinline__ void UnpackKeyVector(const uint4* vectors, int i, Store&& store) {
  constexpr int kSteps = kDim / 32;
  const uint4 vector = vectors[i];
  const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
  const int g = i % 32 / 4;
  const int t = i % 4;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const int index = i / 32 * 4 + w;
    const int token = 16 * (index / kSteps) + g;
    const int channel = 32 * (index % kSteps) + 4 * t;
    store(token, channel, words[w]);
    store(token + 8, channel, words[w] >> 2);
    store(token, channel + 16, words[w] >> 4);
    store(token + 8, channel + 16, words[w] >> 6);
  }
}

// Four of V's words, of channels g = 4 q .. 4 q + 3; `i` of kDim.
template <typename Store>
__device__ __forceinline__ void UnpackValueWords(const uint32_t* words, int i, Store&& store) {
  const int index = i / 8;
  const int q = i % 8 / 4;
  const int t = i % 4;
  uint32_t w[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    w[c] = words[Int2HeadBlock::WordIndex(static_cast<uint32_t>(index),
                                          static_cast<uint32_t>(4 * (4 * q + c) + t))];
  }
  const uint32_t low[2] = {__byte_perm(w[0], w[1], 0x5140), __byte_perm(w[2], w[3], 0x5140)};
  const uint32_t high[2] = {__byte_perm(w[0], w[1], 0x7362), __byte_perm(w[2], w[3], 0x7362)};
  const uint32_t four[4] = {
      __byte_perm(low[0], low[1], 0x5410), __byte_perm(low[0], low[1], 0x7632),
      __byte_perm(high[0], high[1], 0x5410), __byte_perm(high[0], high[1], 0x7632)};
  const int channel = 16 * (index / 2) + 4 * q;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int token = 16 * j + 8 * (index % 2) + t;
    store(token, channel, four[j]);
    store(token, channel + 8, four[j] >> 2);
    store(token + 4, channel, four[j] >> 4);
    store(token + 4, channel + 8, four[j] >> 6);
  }
}

// Two bytes for each code, 0 to 3, that is in the low bits of a byte of `word`: those of the
// tables' byte of that number.
__device__ __forceinline__ uint2 LookUpCodes(uint32_t word, uint32_t lower, uint32_t upper) {
  word &= 0x03030303u;
  const uint32_t selector = __byte_perm(word | word >> 4, 0, 0x4420);
  const uint32_t high = __byte_perm(upper, 0, selector);
  const uint32_t low = __byte_perm(lower, 0, selector);
  return make_uint2(__byte_perm(low, high, 0x5140), __byte_perm(low, high, 0x7362));
}

}  // namespace crumb::gpu
