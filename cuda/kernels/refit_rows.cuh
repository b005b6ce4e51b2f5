// SPDX-License-Identifier: Apache-2.0
//
// The refit of oscar-int2-tilted: a row's scale and minimum, its codes as they are, moved to where
// its error is least for the queries that attend to it (cuda/reference/demote.cc says what the
// names mean). These measure by M + t t^T, M = (C^T C)^-1 the metric of the feedback factor C and
// t = m + (M - m m^T) x / sqrt(d).
//
// All products in M are plain ones of whitened rows, y = x C^-1, and feedback's weighted errors are
// the whitened error. Whitening is feedback without rounding: y of a block of 16 channels, but for
// C's diagonal, is what the row has there less what y of earlier blocks pushes into it, times the
// inverse of the block on the diagonal. So it goes along with the rounding, block by block and by
// the same operands, and the sums that a (row, range) needs are one more product on the tensor
// cores: whitened rows, and the whitened row of ones and mean query, times the errors.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/open_rows.cuh"

namespace crumb::gpu {

// What a warp needs of its head.
struct RefitOperands {
  const std::byte* whitening;  // As HeadRecord has them.
  const std::byte* readers;
  const __half* weights;  // In shared memory: the inverses on the diagonal, in their unit.
  float loss_unit;        // These as HeadScalars has them.
  float ones2;
  float mean_sum;
  float ones_unit;
  float mean_unit;
};

// Products of one row x and of one error e of it in the metric; 1 is the row of ones.
struct RefitProducts {
  float x2;  // x.x
  float x_ones;
  float x_mean;  // With the mean query, as scores are.
  float ex;      // e.x
  float e_ones;
  float e_mean;
};

// The sums of a warp's 32 rows, as the tensor cores have them.
template <int kDim, bool kRefit>
class RefitSums {};

template <int kDim>
class RefitSums<kDim, true> {
 public:
  using Tile = PageTile<kDim>;
  static constexpr int kTiles = 32 / kRowsOfWarp;

  // Of a block of 16 channels whose errors are at `base` of the scratch. In `rows`, which are as
  // OpenKeyRow left them, y takes its place.
  template <typename Feedback>
  __device__ __forceinline__ void AddBlock(std::byte* rows,
                                           const Feedback& feedback,
                                           const RefitOperands& head,
                                           uint32_t base,
                                           int block,
                                           int lane) {
    const uint4 inverse =
        __ldg(reinterpret_cast<const uint4*>(head.whitening + block * 512) + lane);
    const uint2 reader = __ldg(reinterpret_cast<const uint2*>(head.readers) + block * 32 + lane);
    const auto* weights = reinterpret_cast<const __half2*>(head.weights + block * 16) + lane % 4;
    const __half2 weight[2] = {weights[0], weights[4]};
    uint32_t weighted[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      std::byte* tile = rows + m * kRowsOfWarp * int{Tile::kStride};
      uint32_t y[4];
      Whiten(tile, feedback, inverse, block, lane, weight, y, squares_[m]);
      MmaF16(rows_with_readers_[m], y, reader.x, reader.y);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const __half2 w = weight[i / 2];
        weighted[m][i] = AsWord(__hmul2(AsHalves(y[i]), __hmul2(w, w)));
      }
    }
    const uint32_t readers[4] = {reader.x, 0, reader.y, 0};
#pragma unroll
    for (int pair = 0; pair < kProblemChunks / 2; ++pair) {
      uint32_t b[4];
      AwareScratch<kDim>::LoadOperands(b, base, pair, lane);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int chunk = 2 * pair + i;
        MmaF16(with_rows_[chunk], weighted[chunk / 4], b[2 * i], b[2 * i + 1]);
        MmaF16(with_readers_[chunk], readers, b[2 * i], b[2 * i + 1]);
      }
    }
    __syncwarp();  // Rows are as said.
  }

  // Of the lane's row. The whole warp; its errors are lost.
  __device__ __forceinline__ void Finish(AwareScratch<kDim>& scratch,
                                         const RefitOperands& head,
                                         const OpenRow& open,
                                         int lane,
                                         RefitProducts (&products)[kRangesOfRow]) {
    // [3][64 problems]: with the problem's own row, with ones, with the mean; [32 rows]: y.y, y.1,
    // y.m.
    auto* sums = reinterpret_cast<float2*>(scratch.errors);
    auto* of_rows = reinterpret_cast<float4*>(sums + 3 * 32);
    const int g = lane / 4;
    const int t = lane % 4;
#pragma unroll
    for (int chunk = 0; chunk < kProblemChunks; ++chunk) {
      // Problems 8 chunk + 2t and the next are of row 4 chunk + t.
      if (g == (4 * chunk + t) % 8) {
        const int half = 4 * chunk % kRowsOfWarp / 8;
        sums[4 * chunk + t] =
            make_float2(with_rows_[chunk][2 * half], with_rows_[chunk][2 * half + 1]);
      }
      if (g < 2) {
        sums[32 * (1 + g) + 4 * chunk + t] =
            make_float2(with_readers_[chunk][0], with_readers_[chunk][1]);
      }
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float square = squares_[m][half];
        square += __shfl_xor_sync(kFullWarp, square, 1);
        square += __shfl_xor_sync(kFullWarp, square, 2);
        if (t == 0) {
          of_rows[kRowsOfWarp * m + 8 * half + g] = make_float4(
              square, rows_with_readers_[m][2 * half], rows_with_readers_[m][2 * half + 1], 0.0f);
        }
      }
    }
    __syncwarp();
    const float4 of_row = of_rows[lane];
    const float y2 = head.loss_unit * of_row.x;
    const float y_ones = head.ones_unit * of_row.y;
    const float y_mean = head.mean_unit * of_row.z;
    const float2 ex = sums[lane];
    const float2 e_ones = sums[32 + lane];
    const float2 e_mean = sums[64 + lane];
#pragma unroll
    for (int i = 0; i < kRangesOfRow; ++i) {
      RefitProducts& of = products[i];
      const float scale = open.levels[i].scale;
      of.e_ones = scale * head.ones_unit * (i == 0 ? e_ones.x : e_ones.y);
      of.e_mean = scale * head.mean_unit * (i == 0 ? e_mean.x : e_mean.y);
      of.ex = scale * head.loss_unit * open.size * (i == 0 ? ex.x : ex.y) + open.center * of.e_ones;
      of.x_ones = open.size * y_ones + open.center * head.ones2;
      of.x_mean = open.size * y_mean + open.center * head.mean_sum;
      of.x2 = open.size * (open.size * y2 + 2 * open.center * y_ones) +
              open.center * open.center * head.ones2;
    }
    __syncwarp();  // The scratch is free.
  }

 private:
  // y of sixteen rows' channels of the block, as operand A, and to where the rows are.
  template <typename Feedback>
  static __device__ __forceinline__ void Whiten(std::byte* rows,
                                                const Feedback& feedback,
                                                const uint4& inverse,
                                                int block,
                                                int lane,
                                                const __half2 (&weight)[2],
                                                uint32_t (&y)[4],
                                                float (&squares)[2]) {
    const std::byte* operand = OperandRow(rows, Tile::kStride, lane);
    uint32_t a[4];
    LoadMatrices(a, operand + block * 32);
    float open[2][4];  // [columns 8 n on].
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = __half22float2(AsHalves(a[i]));
      open[i / 2][i % 2 * 2] = x.x;
      open[i / 2][i % 2 * 2 + 1] = x.y;
    }
    // The operand A that takes errors along the columns is the two operands B that take y along
    // the rows.
#pragma unroll 2
    for (int k = 0; k < block; ++k) {
      const uint4 tile = feedback.Tile(k, block, lane);
      LoadMatrices(a, operand + k * 32);
      MmaF16(open[0], a, tile.x, tile.z);
      MmaF16(open[1], a, tile.y, tile.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = AsWord(__floats2half2_rn(open[i / 2][i % 2 * 2], open[i / 2][i % 2 * 2 + 1]));
    }
    float whitened[2][4] = {};
    MmaF16(whitened[0], a, inverse.x, inverse.z);
    MmaF16(whitened[1], a, inverse.y, inverse.w);
    __syncwarp();  // The block's rows have been read.
    std::byte* to = rows + lane / 4 * int{Tile::kStride} + block * 32 + lane % 4 * 4;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 w = __half22float2(weight[n]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 of = make_float2(whitened[n][2 * half], whitened[n][2 * half + 1]);
        y[2 * n + half] = AsWord(__floats2half2_rn(of.x, of.y));
        *reinterpret_cast<uint32_t*>(to + half * 8 * int{Tile::kStride} + n * 16) = y[2 * n + half];
        const float2 weighted = make_float2(of.x * w.x, of.y * w.y);
        squares[half] = fmaf(weighted.x, weighted.x, fmaf(weighted.y, weighted.y, squares[half]));
      }
    }
  }

  float with_rows_[kProblemChunks][4] = {};  // [row, problem], tiles of eight problems.
  float with_readers_[kProblemChunks][4] = {};
  float rows_with_readers_[kTiles][4] = {};
  float squares_[kTiles][2] = {};  // Of the lane's share of y, weighted.
};

// As the twin's RefitForReaders; e2 is the error's square in the metric. Returns the loss.
template <int kDim>
__device__ __forceinline__ float RefitLevels(const RefitProducts& of,
                                             const RefitOperands& head,
                                             float e2,
                                             RowLevels& levels) {
  constexpr float kLeastShare = 1e-3f;
  constexpr float kMostStretch = 0.5f;
  constexpr float kScale = kDim == 64 ? 0.125f : kDim == 128 ? 0.0883883476f : 0.0625f;
  const float a = levels.scale;
  const float b = levels.min;
  const float ones2 = head.ones2;
  const float tilt_ones = head.mean_sum + kScale * (of.x_ones - of.x_mean * head.mean_sum);
  const float tilt_x = of.x_mean + kScale * (of.x2 - of.x_mean * of.x_mean);
  const float et = of.e_mean + kScale * (of.ex - of.x_mean * of.e_mean);

  const float size = of.x2 + b * b * ones2 + e2;
  const float cross = b * of.x_ones + of.ex - b * of.e_ones;
  const float v2 = size - 2 * cross;
  const float v1 = of.x_ones - b * ones2 - of.e_ones;
  const float ve = of.ex - b * of.e_ones - e2;
  const float vt = tilt_x - b * tilt_ones - et;

  const float vv = v2 + vt * vt;
  const float vo = v1 + vt * tilt_ones;
  const float oo = ones2 + tilt_ones * tilt_ones;
  const float ev = ve + vt * et;
  const float eo = of.e_ones + tilt_ones * et;
  const float determinant = vv * oo - vo * vo;
  const float stretch = (ev * oo - eo * vo) / determinant;
  float p = 0;
  float r = 0;
  if (v2 > kLeastShare * size && determinant > kLeastShare * (vv * oo) &&
      fabsf(stretch) < kMostStretch) {
    levels.scale = ToStoredScale(a + a * stretch);
    p = (levels.scale - a) / a;
    levels.min = ToStoredMin(b + (eo - p * vo) / oo);
    r = levels.min - b;
  }
  const float gain = p * ev + r * eo;
  const float curve = p * p * vv + 2 * p * r * vo + r * r * oo;
  return e2 + et * et - (2 * gain - curve);
}

}  // namespace crumb::gpu
