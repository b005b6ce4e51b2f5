// SPDX-License-Identifier: Apache-2.0
//
// The 64 tokens of a page as operands of prefill attention, in shared memory: rows of K and V in
// bf16, and what scales them. Of INT2 pages the rows are the codes themselves, 0..3.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "crumb/cuda/prefill_attention.h"
#include "cuda/kernels/page_rows.cuh"
#include "cuda/kernels/unpack_codes.cuh"

namespace crumb::gpu {

inline constexpr int kPrefillThreads = 256;

template <int kDim>
struct PrefillTile {
  alignas(16) std::byte keys[PageTile<kDim>::kBytes];
  alignas(16) std::byte values[PageTile<kDim>::kBytes];
  // Of each token: K's scale and minimum, V's scale and minimum.
  alignas(16) float4 meta[kPageTokens];
};

// A pair of a query's elements, as it was loaded, in bf16.
__device__ __forceinline__ uint32_t QueryPair(uint32_t word, ElementType type) {
  if (type == ElementType::kFp16) {
    __half2 pair;
    memcpy(&pair, &word, sizeof(pair));
    const float2 x = __half22float2(pair);
    return PackBf16(x.x, x.y);
  }
  return word;
}

// Four codes as bf16: 0, 1, 2, 3 are 0000, 3f80, 4000, 4040.
template <int kDim>
__device__ __forceinline__ void StoreCodes(std::byte* rows, int token, int channel, uint32_t word) {
  *reinterpret_cast<uint2*>(rows + token * PageTile<kDim>::kStride + channel * 2) =
      LookUpCodes(word, 0x40008000u, 0x40403f00u);
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
      UnpackKeyVector<kDim>(keys, i, [&](int token, int channel, uint32_t word) {
        StoreCodes<kDim>(tile.keys, token, channel, word);
      });
    } else {
      UnpackValueWords(values, i - kDim, [&](int token, int channel, uint32_t word) {
        StoreCodes<kDim>(tile.values, token, channel, word);
      });
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
    if (block != nullptr) {
      CopyAsync16(to + i * 16, block + i * 16);
    } else {
      *reinterpret_cast<uint4*>(to + i * 16) = make_uint4(0, 0, 0, 0);
    }
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

// Elements `index` and `index` + 1 of the outputs, in the type asked for.
__device__ __forceinline__ void StoreOutputPair(const PrefillAttentionParams& params,
                                                size_t index,
                                                float x,
                                                float y) {
  if (params.out_type == ElementType::kFloat32) {
    *reinterpret_cast<float2*>(static_cast<float*>(params.out) + index) = make_float2(x, y);
  } else if (params.out_type == ElementType::kFp16) {
    *reinterpret_cast<__half2*>(static_cast<__half*>(params.out) + index) = __floats2half2_rn(x, y);
  } else {
    *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(params.out) + index) = PackBf16(x, y);
  }
}

// Stores a row of outputs, of which four lanes have a part: `sum` and `offset` are the lane's
// shares of the sum of weights and of what all channels have in common, output(n, i) is its element
// of channel 8 n + 2 t + i, and weights are relative to `highest`, a base-2 exponent. By whole
// warps; lanes without a row store nothing.
template <int kDim, typename Output>
__device__ __forceinline__ void StoreOutputRow(const PrefillAttentionParams& params,
                                               size_t row,
                                               bool has_row,
                                               float highest,
                                               float sum,
                                               float offset,
                                               int lane,
                                               Output&& output) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    sum += __shfl_xor_sync(kFullWarp, sum, step);
    offset += __shfl_xor_sync(kFullWarp, offset, step);
  }
  if (!has_row) {
    return;
  }
  const int t = lane % 4;
  const float inverse = 1 / sum;  // A query sees itself at least.
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
    StoreOutputPair(params, row * kDim + 8 * n + 2 * t, (output(n, 0) + offset) * inverse,
                    (output(n, 1) + offset) * inverse);
  }
  if (params.lse != nullptr && t == 0) {
    params.lse[row] = (highest + log2f(sum)) * 0.6931471805599453f;
  }
}

}  // namespace crumb::gpu
