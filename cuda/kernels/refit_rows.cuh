// SPDX-License-Identifier: Apache-2.0
//
// The refit of oscar-int2-tilted: a row's scale and minimum, its codes as they are, moved to where
// its error is least for the queries that attend to it (cuda/reference/demote.cc says what the
// names mean). These measure by M + t t^T, M = (C^T C)^-1 the metric of the feedback factor C and
// t = m + (M - m m^T) x / sqrt(d).
//
// All products in M are plain ones of whitened rows, y = x C^-1, and feedback's weighted errors are
// the whitened error. So the sums that a (row, range) needs, and those of its row, are one more
// product on the tensor cores: errors and whitened rows times whitened rows, ones and mean query.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/aware_scratch.cuh"
#include "cuda/kernels/round_rows.cuh"

namespace crumb::gpu {

// What a warp needs of its head and of its eight rows.
struct RefitOperands {
  const std::byte* whitened;  // In shared memory, rows as those of a PageTile.
  const std::byte* readers;   // As HeadRecord::readers().
  float ones2;                // HeadScalars::ones_in_metric.
  float mean_sum;             // HeadScalars::query_mean_sum.
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

// Of the lane's row and range. The whole warp; takes scratch.sums.
template <int kDim>
__device__ __forceinline__ RefitProducts MultiplyForRefit(AwareScratch<kDim>& scratch,
                                                          const RefitOperands& operands,
                                                          int lane) {
  using Scratch = AwareScratch<kDim>;
  const std::byte* errors = OperandRow(scratch.errors, Scratch::kErrorStride, lane);
  const std::byte* rows = operands.whitened + lane % 8 * PageTile<kDim>::kStride + lane / 8 * 16;
  const auto* readers = reinterpret_cast<const uint2*>(operands.readers) + lane;
  float of_errors[2][2][4] = {};
  float of_rows[2][4] = {};
#pragma unroll 1
  for (int k = 0; k < kDim / 16; k += 2) {
    uint32_t y[4];  // Both as A, rows 0..7, and as B, columns 0..7, of two steps.
    LoadMatrices(y, rows + k * 32);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const uint2 row = make_uint2(y[2 * step], y[2 * step + 1]);
      const uint2 reader = __ldg(&readers[(k + step) * 32]);
      MmaBf16Rows8(of_rows[0], row.x, row.y, row);
      MmaBf16Rows8(of_rows[1], row.x, row.y, reader);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        uint32_t a[4];
        LoadMatrices(a, errors + m * 16 * Scratch::kErrorStride + (k + step) * 32);
        MmaBf16(of_errors[m][0], a, row.x, row.y);
        MmaBf16(of_errors[m][1], a, reader.x, reader.y);
      }
    }
  }
  StoreSums(scratch, of_errors, lane);
  // A row's square is on the diagonal: in lane 4 r + r / 2, there the (r % 2)-th.
  const int r = lane % 8;
  const float square = lane / 4 % 2 == 0 ? of_rows[0][0] : of_rows[0][1];
  RefitProducts products;
  products.x2 = __shfl_sync(kFullWarp, square, 4 * r + r / 2);
  products.x_ones = __shfl_sync(kFullWarp, of_rows[1][0], 4 * r);
  products.x_mean = __shfl_sync(kFullWarp, of_rows[1][1], 4 * r);
  __syncwarp();
  const float* sums = scratch.sums + lane * Scratch::kSumStride;
  products.ex = sums[r];
  products.e_ones = sums[8];
  products.e_mean = sums[9];
  return products;
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
