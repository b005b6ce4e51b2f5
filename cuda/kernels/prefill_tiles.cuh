// SPDX-License-Identifier: Apache-2.0
//
// The 64 tokens of a page as operands of prefill attention, in shared memory: rows of K and V in
// bf16, and what scales them. Of INT2 pages the rows are the codes themselves, 0..3.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "crumb/cuda/prefill_attention.h"
#include "cuda/kernels/page_rows.cuh"

namespace crumb::gpu {

inline constexpr int kPrefillThreads = 256;

template <int kDim>
struct PrefillTile {
  alignas(16) std::byte keys[PageTile<kDim>::kBytes];
  alignas(16) std::byte values[PageTile<kDim>::kBytes];
  // Of each token: K's scale and minimum, V's scale and minimum.
  alignas(16) float4 meta[kPageTokens];
};

// Four codes, one a byte, as bf16: 0, 1, 2, 3 are 0000, 3f80, 4000, 4040.
__device__ __forceinline__ uint2 CodesToBf16(uint32_t word) {
  word &= 0x03030303u;
  const uint32_t selector = __byte_perm(word | word >> 4, 0, 0x4420);
  const uint32_t upper = __byte_perm(0x40403f00u, 0, selector);
  const uint32_t lower = __byte_perm(0x40008000u, 0, selector);
  return make_uint2(__byte_perm(lower, upper, 0x5140), __byte_perm(lower, upper, 0x7362));
}

template <int kDim>
__device__ __forceinline__ void StoreCodes(std::byte* rows, int token, int channel, uint32_t word) {
  *reinterpret_cast<uint2*>(rows + token * PageTile<kDim>::kStride + channel * 2) =
      CodesToBf16(word);
}

// K's words of vector i, of kDim.
template <int kDim>
__device__ __forceinline__ void UnpackKeyVector(const uint4* vectors, int i, std::byte* rows) {
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
    StoreCodes<kDim>(rows, token, channel, words[w]);
    StoreCodes<kDim>(rows, token + 8, channel, words[w] >> 2);
    StoreCodes<kDim>(rows, token, channel + 16, words[w] >> 4);
    StoreCodes<kDim>(rows, token + 8, channel + 16, words[w] >> 6);
  }
}

// Four of V's words, of channels g = 4 q .. 4 q + 3, i of kDim.
template <int kDim>
__device__ __forceinline__ void UnpackValueWords(const uint32_t* words, int i, std::byte* rows) {
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
    StoreCodes<kDim>(rows, token, channel, four[j]);
    StoreCodes<kDim>(rows, token, channel + 8, four[j] >> 2);
    StoreCodes<kDim>(rows, token + 4, channel, four[j] >> 4);
    StoreCodes<kDim>(rows, token + 4, channel + 8, four[j] >> 6);
  }
}

// An INT2 head block, which is in shared memory, to a tile.
template <int kDim>
__device__ __forceinline__ void UnpackTile(const std::byte* block, PrefillTile<kDim>& tile) {
  constexpr Int2HeadBlock kFormat{kDim, kDim};
  const auto* keys = reinterpret_cast<const uint4*>(block + kFormat.key_codes_offset());
  const auto* values = reinterpret_cast<const uint32_t*>(block + kFormat.value_codes_offset());
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = thread; i < 2 * kDim; i += kPrefillThreads) {
    if (i < kDim) {
      UnpackKeyVector<kDim>(keys, i, tile.keys);
    } else {
      UnpackValueWords<kDim>(values, i - kDim, tile.values);
    }
  }
  if (thread < int{kPageTokens}) {
    const auto token = static_cast<uint32_t>(thread);
    const float2 key =
        __half22float2(*reinterpret_cast<const __half2*>(block + kFormat.KeyMetaByte(token)));
    const float2 value =
        __half22float2(*reinterpret_cast<const __half2*>(block + kFormat.ValueMetaByte(token)));
    tile.meta[thread] = make_float4(key.x, key.y, value.x, value.y);
  }
}

// Starts to copy an INT2 head block into shared memory.
template <int kDim>
__device__ __forceinline__ void LoadBlockAsync(std::byte* to, const std::byte* block) {
  constexpr int kChunks = static_cast<int>(Int2HeadBlock{kDim, kDim}.bytes() / 16);
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kChunks; i += kPrefillThreads) {
    CopyAsync16(to + i * 16, block + i * 16);
  }
}

// Starts to copy `count` BF16 rows of a head block into a tile; the others become zero.
template <int kDim>
__device__ __forceinline__ void LoadWindowAsync(PrefillTile<kDim>& tile,
                                                const std::byte* block,
                                                int count) {
  using Tile = PageTile<kDim>;
  constexpr int kChunks = Tile::kRowBytes / 16;
  constexpr Bf16HeadBlock kFormat{kDim, kDim};
  for (int i = static_cast<int>(threadIdx.x); i < int{kPageTokens} * kChunks;
       i += kPrefillThreads) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    const uint32_t to = row * Tile::kStride + chunk * 16;
    if (row < count) {
      const std::byte* from = block + row * Tile::kRowBytes + chunk * 16;
      CopyAsync16(tile.keys + to, from + kFormat.key_offset());
      CopyAsync16(tile.values + to, from + kFormat.value_offset());
    } else {
      *reinterpret_cast<uint4*>(tile.keys + to) = make_uint4(0, 0, 0, 0);
      *reinterpret_cast<uint4*>(tile.values + to) = make_uint4(0, 0, 0, 0);
    }
  }
  if (threadIdx.x < kPageTokens) {
    tile.meta[threadIdx.x] = make_float4(1, 0, 1, 0);
  }
}

}  // namespace crumb::gpu
