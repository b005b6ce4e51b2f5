// SPDX-License-Identifier: Apache-2.0
//
// A KV head's queries as the tensor cores want them. Against codes they are fixed point of two
// signed base-256 digits; against BF16 rows, two bf16 whose sum is the query to 16 bits. Both ways
// a tile is four heads of two digits: the eight columns of a B operand.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "crumb/cuda/decode_params.h"
#include "cuda/kernels/ptx.cuh"

namespace crumb::gpu {

inline constexpr int kHeadsOfTile = 4;
// The largest |integer| of two digits: 127 * 256. A little less than 2^15, so that no high digit
// becomes 128 by rounding.
inline constexpr float kDigitRange = 32512;

template <int kHeadDim, int kTiles>
struct QueryFragments {
  // Word (step of 32 channels, half of 16, lane) of a tile: digits of four channels.
  uint32_t digits[kTiles][kHeadDim / 32][2][32];
  // (step of 16 channels, lane, half of 8): two channels.
  uint32_t bf16[kTiles][kHeadDim / 16][32][2];
  // To base-2 exponents: a digit sum's worth, and that of the minimum of a row.
  float unit[kTiles * kHeadsOfTile];
  float sum[kTiles * kHeadsOfTile];
};

// A lane's part of a query as it is in memory: four consecutive channels a chunk.
template <int kHeadDim>
struct RawQuery {
  static constexpr int kChunks = kHeadDim / 4;
  static constexpr int kChunksOfLane = (kChunks + 31) / 32;
  uint2 chunks[kChunksOfLane];

  // Starts to load the query of this row, or takes zeros.
  __device__ __forceinline__ void Load(const void* queries, size_t row, bool is_there, int lane) {
    const auto* source = static_cast<const uint2*>(queries) + row * kChunks;
#pragma unroll
    for (int i = 0; i < kChunksOfLane; ++i) {
      const int chunk = lane + 32 * i;
      chunks[i] = is_there && chunk < kChunks ? source[chunk] : make_uint2(0, 0);
    }
  }
  __device__ __forceinline__ float4 Get(int i, ElementType type) const {
    const uint2 raw = chunks[i];
    const bool is_bf16 = type == ElementType::kBf16;
    const float2 low = is_bf16 ? __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(raw.x))
                               : __half22float2(reinterpret_cast<const __half2&>(raw.x));
    const float2 high = is_bf16 ? __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(raw.y))
                                : __half22float2(reinterpret_cast<const __half2&>(raw.y));
    return make_float4(low.x, low.y, high.x, high.y);
  }
};

__device__ __forceinline__ uint32_t PackBf16(__nv_bfloat16 low, __nv_bfloat16 high) {
  const __nv_bfloat162 pair(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// By one warp, for head `head` of a pass; a head that is not there comes as zeros.
template <int kHeadDim, int kTiles>
__device__ __forceinline__ void PrepareQuery(const SplitDecodeParams& params,
                                             const RawQuery<kHeadDim>& raw,
                                             int head,
                                             int lane,
                                             QueryFragments<kHeadDim, kTiles>& fragments) {
  constexpr int kChunks = RawQuery<kHeadDim>::kChunks;
  constexpr int kChunksOfLane = RawQuery<kHeadDim>::kChunksOfLane;
  float4 values[kChunksOfLane];
  float largest = 0;
#pragma unroll
  for (int i = 0; i < kChunksOfLane; ++i) {
    values[i] = raw.Get(i, params.query_type);
    largest = fmaxf(fmaxf(largest, fmaxf(fabsf(values[i].x), fabsf(values[i].y))),
                    fmaxf(fabsf(values[i].z), fabsf(values[i].w)));
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, step));
  }
  const float inverse = largest > 0 ? kDigitRange / largest : 0;
  const int tile = head / kHeadsOfTile;
  const int column = head % kHeadsOfTile * 2;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kChunksOfLane; ++i) {
    const int chunk = lane + 32 * i;
    const float v[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
    uint32_t high_word = 0;
    uint32_t low_word = 0;
    __nv_bfloat16 high_part[4];
    __nv_bfloat16 low_part[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int integer = __float2int_rn(v[j] * inverse);
      sum += integer;
      high_word |= static_cast<uint32_t>(((integer + 128) >> 8) & 255) << (8 * j);
      low_word |= static_cast<uint32_t>(integer & 255) << (8 * j);
      high_part[j] = __float2bfloat16_rn(v[j]);
      low_part[j] = __float2bfloat16_rn(v[j] - __bfloat162float(high_part[j]));
    }
    if (chunk < kChunks) {
      uint32_t* digits = &fragments.digits[tile][chunk / 8][chunk % 8 / 4][column * 4 + chunk % 4];
      digits[0] = high_word;
      digits[4] = low_word;
      const int lane_of_pair = column * 4 + chunk % 2 * 2;
      auto& words = fragments.bf16[tile][chunk / 4];
      const int half = chunk % 4 / 2;
      words[lane_of_pair][half] = PackBf16(high_part[0], high_part[1]);
      words[lane_of_pair + 1][half] = PackBf16(high_part[2], high_part[3]);
      words[lane_of_pair + 4][half] = PackBf16(low_part[0], low_part[1]);
      words[lane_of_pair + 5][half] = PackBf16(low_part[2], low_part[3]);
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    sum += __shfl_xor_sync(kFullWarp, sum, step);
  }
  if (lane == 0) {
    constexpr float kLog2E = 1.4426950408889634f;
    const float unit = largest * (1 / kDigitRange) * params.scale * kLog2E;
    fragments.unit[head] = unit;
    fragments.sum[head] = static_cast<float>(sum) * unit;
  }
}

}  // namespace crumb::gpu
