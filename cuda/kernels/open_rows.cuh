// SPDX-License-Identifier: Apache-2.0
//
// Rows of keys before they are rounded with feedback: each is centred and scaled into fp16, and has
// the levels of four ranges.
//
// The ranges are the codec's: the whole row's, and those cut at the 0.98, 0.95 and 0.90 of its
// magnitudes. The codec says which range is tried, not which is kept, so the cuts need not be order
// statistics: here they follow from the row's root mean square, which costs a tenth. They are a
// little narrower than a normal row's quantiles, where the loss is less: see decision 0115.
#pragma once

#include <cstdint>

#include "cuda/kernels/aware_scratch.cuh"
#include "cuda/kernels/packed.cuh"
#include "cuda/kernels/page_rows.cuh"
#include "cuda/kernels/row_levels.cuh"

namespace crumb::gpu {

// Over the four lanes of a row.
template <typename Combine>
__device__ __forceinline__ auto ReduceRow(auto value, Combine&& combine) {
  value = combine(value, __shfl_xor_sync(kFullWarp, value, 8));
  return combine(value, __shfl_xor_sync(kFullWarp, value, 16));
}

// One lane's share of a row, of which lane r + 8 p has the chunks p, p + 4, ... of eight channels,
// and what all four lanes of the row know of it.
template <int kDim>
struct RowShare {
  static constexpr int kChunks = kDim / 32;
  __nv_bfloat162 pairs[kChunks][4];
  int largest;  // Magnitude's bits; 0x7f80 and more: the row holds inf or NaN.
  float low;
  float high;

  __device__ __forceinline__ void Load(const std::byte* row, int part) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint4 chunk = *reinterpret_cast<const uint4*>(row + (part + 4 * i) * 16);
      pairs[i][0] = AsPair(chunk.x);
      pairs[i][1] = AsPair(chunk.y);
      pairs[i][2] = AsPair(chunk.z);
      pairs[i][3] = AsPair(chunk.w);
    }
    __nv_bfloat162 most = AsPair(0);
    __nv_bfloat162 least = pairs[0][0];
    __nv_bfloat162 greatest = pairs[0][0];
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        most = __hmax2_nan(most, __habs2(pairs[i][j]));
        least = __hmin2(least, pairs[i][j]);
        greatest = __hmax2(greatest, pairs[i][j]);
      }
    }
    const uint32_t word = AsWord(most) & 0x7fff7fffu;
    const int mine = static_cast<int>(max(word & 0xffff, word >> 16));
    largest = ReduceRow(mine, [](int a, int b) { return max(a, b); });
    low = ReduceRow(fminf(__low2float(least), __high2float(least)),
                    [](float a, float b) { return fminf(a, b); });
    high = ReduceRow(fmaxf(__low2float(greatest), __high2float(greatest)),
                     [](float a, float b) { return fmaxf(a, b); });
  }

  // Of the whole row.
  __device__ __forceinline__ float SumOfSquares() const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = __bfloat1622float2(pairs[i][j]);
        sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
      }
    }
    return ReduceRow(sum, [](float a, float b) { return a + b; });
  }

  // (x - center) * factor of the share in fp16, to the row that it was loaded from.
  __device__ __forceinline__ void StoreHalves(std::byte* row,
                                              int part,
                                              float factor,
                                              float center) const {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      __half2 halves[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = __bfloat1622float2(pairs[i][j]);
        halves[j] = __floats2half2_rn((x.x - center) * factor, (x.y - center) * factor);
      }
      memcpy(row + (part + 4 * i) * 16, halves, sizeof(halves));
    }
  }
};

// A lane's row, and its levels of the two ranges that the lane has.
struct OpenRow {
  RowLevels levels[kProblemsOfLane];
  float size;  // The row is center + size * what is in the tile.
  float center;
};

__device__ __forceinline__ float CutOfRange(int range, float root_mean_square) {
  const float cut = range == 1 ? 2.10f : range == 2 ? 1.77f : 1.48f;
  return range == 0 ? INFINITY : cut * root_mean_square;
}

// Sixteen rows of the tile from `first_token` on, in place. Lowers `bad_token` to the lane's first
// that is not finite.
template <int kDim>
__device__ __forceinline__ OpenRow
OpenRows(std::byte* rows, int first_token, int lane, int& bad_token) {
  OpenRow mine = {};
  const int part = lane / 8;  // Four lanes a row, each of which has the levels of one range.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = first_token + 8 * half + lane % 8;
    std::byte* row = rows + token * PageTile<kDim>::kStride;
    RowShare<kDim> share;
    share.Load(row, part);
    if (share.largest >= 0x7f80) {
      bad_token = min(bad_token, token);
    }
    const float cut = CutOfRange(part, sqrtf(share.SumOfSquares() * (1.0f / kDim)));
    const RowLevels levels = MakeLevels(share.low, share.high, cut);
    const float center = 0.5f * share.low + 0.5f * share.high;
    const uint32_t exponent =
        min(max(__float_as_uint(0.5f * share.high - 0.5f * share.low) >> 23, 1u), 253u);
    const float size = __uint_as_float(exponent << 23);
    share.StoreHalves(row, part, __uint_as_float((254 - exponent) << 23), center);
    const bool is_mine = lane % kRowsOfWarp / 8 == half;
#pragma unroll
    for (int i = 0; i < kProblemsOfLane; ++i) {
      const int source = lane % 8 + 8 * (lane / 16 * kProblemsOfLane + i);
      const float scale = __shfl_sync(kFullWarp, levels.scale, source);
      const float min = __shfl_sync(kFullWarp, levels.min, source);
      mine.levels[i].scale = is_mine ? scale : mine.levels[i].scale;
      mine.levels[i].min = is_mine ? min : mine.levels[i].min;
    }
    const float its_size = __shfl_sync(kFullWarp, size, lane % 8);
    const float its_center = __shfl_sync(kFullWarp, center, lane % 8);
    mine.size = is_mine ? its_size : mine.size;
    mine.center = is_mine ? its_center : mine.center;
  }
  __syncwarp();  // The tile is as said.
  return mine;
}

}  // namespace crumb::gpu
