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
#include "cuda/kernels/round_rows.cuh"

namespace crumb::gpu {

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
