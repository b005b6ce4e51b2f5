// SPDX-License-Identifier: Apache-2.0
//
// Rows of keys before they are rounded with feedback: each is centred and scaled into fp16, and has
// the levels of two ranges.
//
// The codec says how a range's codes are found and that the range of least loss is kept; which
// ranges are tried only moves that loss. The codec's four are the whole row's and those cut at
// order statistics. Two do as well that are cut around the middle between the row's mean and the
// centre of its extremes, at multiples of the geometric mean of its deviation and half its width:
// see decision 0132.
#pragma once

#include <cstdint>

#include "cuda/kernels/aware_scratch.cuh"
#include "cuda/kernels/packed.cuh"
#include "cuda/kernels/page_rows.cuh"
#include "cuda/kernels/row_levels.cuh"

namespace crumb::gpu {

// A row as it is in the tile after OpenRows, and its levels in each range.
struct OpenRow {
  RowLevels levels[kRangesOfRow];
  float size;  // The row is center + size * what is in the tile.
  float center;
  bool is_finite;
};

// Where the ranges are cut, from measured losses of rows of real and random heads.
template <int kDim>
__device__ __forceinline__ float CutOf(int range) {
  constexpr float kCuts[kRangesOfRow] = {kDim == 64    ? 1.06f
                                         : kDim == 128 ? 0.98f
                                                       : 0.94f,
                                         kDim == 64    ? 1.20f
                                         : kDim == 128 ? 1.10f
                                                       : 1.06f};
  return kCuts[range];
}

// The least and the greatest of the numbers of a row.
template <int kDim>
__device__ __forceinline__ float2 FindBounds(const std::byte* row) {
  __nv_bfloat162 least = *reinterpret_cast<const __nv_bfloat162*>(row);
  __nv_bfloat162 greatest = least;
#pragma unroll 4
  for (int i = 0; i < kDim / 8; ++i) {
    const uint4 chunk = *reinterpret_cast<const uint4*>(row + i * 16);
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      least = __hmin2(least, AsPair(words[j]));
      greatest = __hmax2(greatest, AsPair(words[j]));
    }
  }
  return make_float2(fminf(__low2float(least), __high2float(least)),
                     fmaxf(__low2float(greatest), __high2float(greatest)));
}

// Centres and scales the row in place. The sum of what is then in the tile, and of its squares.
template <int kDim>
__device__ __forceinline__ float2 CenterRow(std::byte* row, float factor, float shift) {
  __half2 sums[4] = {};
  __half2 squares[4] = {};
#pragma unroll 2
  for (int i = 0; i < kDim / 8; ++i) {
    uint4& chunk = *reinterpret_cast<uint4*>(row + i * 16);
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    __half2 halves[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float low = __uint_as_float(words[j] << 16);
      const float high = __uint_as_float(words[j] & 0xffff0000u);
      halves[j] = __floats2half2_rn(fmaf(low, factor, shift), fmaf(high, factor, shift));
      sums[j] = __hadd2(sums[j], halves[j]);
      squares[j] = __hfma2(halves[j], halves[j], squares[j]);
    }
    chunk = make_uint4(AsWord(halves[0]), AsWord(halves[1]), AsWord(halves[2]), AsWord(halves[3]));
  }
  const auto total = [](const __half2(&parts)[4]) {
    const float2 a = __half22float2(__hadd2(parts[0], parts[1]));
    const float2 b = __half22float2(__hadd2(parts[2], parts[3]));
    return (a.x + a.y) + (b.x + b.y);
  };
  return make_float2(total(sums), total(squares));
}

// The lane's row, in place.
template <int kDim>
__device__ __forceinline__ OpenRow OpenKeyRow(std::byte* row) {
  const float2 bounds = FindBounds<kDim>(row);
  const float middle = 0.5f * bounds.x + 0.5f * bounds.y;
  const float half_width = 0.5f * bounds.y - 0.5f * bounds.x;
  // A power of two; no bf16 row that is not constant is narrower beside its middle than 2^-9.
  const uint32_t of_width = __float_as_uint(half_width) >> 23;
  const uint32_t of_middle = __float_as_uint(fabsf(middle)) >> 23;
  const uint32_t exponent = min(max(max(of_width, of_middle - min(of_middle, 16u)), 1u), 253u);
  OpenRow open;
  open.size = __uint_as_float(exponent << 23);
  open.center = middle;
  const float factor = __uint_as_float((254 - exponent) << 23);
  const float2 sums = CenterRow<kDim>(row, factor, -middle * factor);
  open.is_finite = sums.x - sums.x == 0;  // Of finite numbers the sum is far below fp16's largest.
  const float mean = sums.x * (1.0f / kDim);
  const float deviation = sqrtf(fmaxf(sums.y * (1.0f / kDim) - mean * mean, 0.0f));
  const float center = middle + 0.5f * mean * open.size;
  const float unit = sqrtf(half_width * factor * deviation) * open.size;
#pragma unroll
  for (int i = 0; i < kRangesOfRow; ++i) {
    const float cut = CutOf<kDim>(i) * unit;
    open.levels[i] =
        MakeLevels(fmaxf(bounds.x, center - cut), fminf(bounds.y, center + cut), INFINITY);
  }
  return open;
}

}  // namespace crumb::gpu
