// SPDX-License-Identifier: Apache-2.0
//
// The refit of oscar-int2-tilted: a row's scale and minimum, its codes as they are, moved to where
// its error is least for the queries that attend to it (cuda/reference/demote.cc says what the
// names mean). These measure by M + t t^T, M = (C^T C)^-1 the metric of the feedback factor C and
// t = m + (M - m m^T) x / sqrt(d).
//
// All products in M are plain ones of whitened rows, y = x C^-1, and feedback's weighted errors are
// the whitened error. So the sums that a (row, range) needs are one more product on the tensor
// cores: whitened rows, and the whitened row of ones and mean query, times the errors. The columns
// of the whitened rows are in units that take the errors as feedback leaves them.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/open_rows.cuh"

namespace crumb::gpu {

// What a warp needs of its head and of the page.
struct RefitOperands {
  const std::byte* whitened;  // [token] rows as those of a PageTile, fp16; as WhitenPageRows.
  const float4* row_sums;     // [num_parts, token], parts of the sums; as WhitenPageRows.
  int num_parts;
  const std::byte* readers;  // As HeadRecord::readers().
  float loss_unit;           // These as HeadScalars has them.
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

// to = from * C^-1 of the rows as OpenRows leaves them; all warps, each its columns. `sums` [token]
// gets those columns' part of the sums of y.y, y.1 and y.m, in the units of the tile's rows.
template <int kDim, int kWarps>
__device__ __forceinline__ void WhitenPageRows(const std::byte* from,
                                               const RotationColumns<kDim, kWarps>& matrix,
                                               const float* vectors,
                                               std::byte* to,
                                               float4* sums,
                                               int warp,
                                               int lane) {
  using Tile = PageTile<kDim>;
  using Columns = RotationColumns<kDim, kWarps>;
  const int g = lane / 4;
  const int first_column = warp * Columns::kTiles * 8 + 2 * (lane % 4);
#pragma unroll 1
  for (int row = 0; row < int{kPageTokens}; row += 16) {
    float y[Columns::kTiles][4] = {};
    const std::byte* operand = OperandRow(from + row * Tile::kStride, Tile::kStride, lane);
#pragma unroll
    for (int k = 0; k < Columns::kSteps; ++k) {
      uint32_t a[4];
      LoadMatrices(a, operand + k * 32);
#pragma unroll
      for (int n = 0; n < Columns::kTiles; ++n) {
        MmaF16(y[n], a, matrix.b[n][k].x, matrix.b[n][k].y);
      }
    }
    std::byte* out = to + (row + g) * Tile::kStride + first_column * 2;
    float parts[2][3] = {};
#pragma unroll
    for (int n = 0; n < Columns::kTiles; ++n) {
      float2 of[3];
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        of[i] = __ldg(reinterpret_cast<const float2*>(vectors + i * kDim + first_column + 8 * n));
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<__half2*>(out + 8 * half * Tile::kStride + n * 16) =
            __floats2half2_rn(y[n][2 * half], y[n][2 * half + 1]);
        const float x = y[n][2 * half] * of[0].x;
        const float next = y[n][2 * half + 1] * of[0].y;
        parts[half][0] += x * x + next * next;
        parts[half][1] += x * of[1].x + next * of[1].y;
        parts[half][2] += x * of[2].x + next * of[2].y;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        parts[half][i] += __shfl_xor_sync(kFullWarp, parts[half][i], 1);
        parts[half][i] += __shfl_xor_sync(kFullWarp, parts[half][i], 2);
      }
      if (lane % 4 == 0) {
        sums[row + 8 * half + g] =
            make_float4(parts[half][0], parts[half][1], parts[half][2], 0.0f);
      }
    }
  }
}

// Of the lane's row and two ranges; levels are those that the errors are measured in. The whole
// warp; its errors are lost.
template <int kDim>
__device__ __forceinline__ void MultiplyForRefit(AwareScratch<kDim>& scratch,
                                                 const RefitOperands& operands,
                                                 const OpenRow& open,
                                                 int token,
                                                 int lane,
                                                 RefitProducts (&products)[kProblemsOfLane]) {
  const std::byte* rows =
      OperandRow(operands.whitened + (token - lane % kRowsOfWarp) * PageTile<kDim>::kStride,
                 PageTile<kDim>::kStride, lane);
  const auto* readers = reinterpret_cast<const uint2*>(operands.readers) + lane;
  float with_rows[8][4] = {};  // [row, problem], tiles of eight problems.
  float with_readers[8][4] = {};
#pragma unroll 1
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t a[4];
    LoadMatrices(a, rows + k * 32);
    const uint2 reader = __ldg(&readers[k * 32]);
    const uint32_t reader_rows[4] = {reader.x, 0, reader.y, 0};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint32_t b[4];
      AwareScratch<kDim>::LoadOperands(b, scratch.base(k), pair, lane);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        MmaF16(with_rows[2 * pair + i], a, b[2 * i], b[2 * i + 1]);
        MmaF16(with_readers[2 * pair + i], reader_rows, b[2 * i], b[2 * i + 1]);
      }
    }
  }
  __syncwarp();
  // [3][64 problems]: with the problem's own row, with ones, with the mean.
  auto* sums = reinterpret_cast<float2*>(scratch.errors);
  const int g = lane / 4;
  const int t = lane % 4;
#pragma unroll
  for (int chunk = 0; chunk < 8; ++chunk) {
    // Problems 8 chunk + 2t and the next are of row (4 chunk + t) % 16.
    if (g == (4 * chunk + t) % 8) {
      const int half = 4 * chunk % 16 / 8;
      sums[4 * chunk + t] = make_float2(with_rows[chunk][2 * half], with_rows[chunk][2 * half + 1]);
    }
    if (g < 2) {
      sums[32 * (1 + g) + 4 * chunk + t] =
          make_float2(with_readers[chunk][0], with_readers[chunk][1]);
    }
  }
  float3 of_row = make_float3(0, 0, 0);
  for (int part = 0; part < operands.num_parts; ++part) {
    const float4 of_part = operands.row_sums[part * int{kPageTokens} + token];
    of_row.x += of_part.x;
    of_row.y += of_part.y;
    of_row.z += of_part.z;
  }
  __syncwarp();
  const float2 ex = sums[lane];
  const float2 e_ones = sums[32 + lane];
  const float2 e_mean = sums[64 + lane];
#pragma unroll
  for (int i = 0; i < kProblemsOfLane; ++i) {
    RefitProducts& of = products[i];
    const float scale = open.levels[i].scale;
    of.e_ones = scale * operands.ones_unit * (i == 0 ? e_ones.x : e_ones.y);
    of.e_mean = scale * operands.mean_unit * (i == 0 ? e_mean.x : e_mean.y);
    of.ex =
        scale * operands.loss_unit * open.size * (i == 0 ? ex.x : ex.y) + open.center * of.e_ones;
    of.x_ones = open.size * of_row.y + open.center * operands.ones2;
    of.x_mean = open.size * of_row.z + open.center * operands.mean_sum;
    of.x2 = open.size * (open.size * of_row.x + 2 * open.center * of_row.y) +
            open.center * open.center * operands.ones2;
  }
}

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
