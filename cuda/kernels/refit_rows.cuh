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

#include "cuda/kernels/aware_scratch.cuh"
#include "cuda/kernels/feedback_operands.cuh"
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

inline constexpr int kTilesOfWarp = 32 / kRowsOfWarp;

// What a whitened block pushes into a later one, as operands: its y, and the feedback.
template <int kDim>
struct WhitenedOperands {
  uint32_t rows[kTilesOfWarp][4];
  uint32_t tile[4];

  // `rows` are the warp's, y where blocks before `block` were.
  __device__ __forceinline__ void Load(
      const std::byte* from, const FeedbackOperands& feedback, int k, int block, int lane) {
    feedback.LoadForRows(tile, k, block, lane);
    LoadRows(from, k, lane);
  }
  __device__ __forceinline__ void LoadRows(const std::byte* from, int block, int lane) {
    using Tile = PageTile<kDim>;
#pragma unroll
    for (int m = 0; m < kTilesOfWarp; ++m) {
      const std::byte* its = from + m * kRowsOfWarp * int{Tile::kStride};
      LoadMatrices(rows[m], OperandRow(its, Tile::kStride, lane) + block * 32);
    }
  }
};

// A block of 16 channels of a warp's 32 rows on its way to y: what the rows have there, less what y
// of earlier blocks pushes into it.
template <int kDim, bool kRefit>
class OpenBlock {};

template <int kDim>
class OpenBlock<kDim, true> {
 public:
  __device__ __forceinline__ void Load(const std::byte* rows, int block, int lane) {
    WhitenedOperands<kDim> x;
    x.LoadRows(rows, block, lane);
#pragma unroll
    for (int m = 0; m < kTilesOfWarp; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = __half22float2(AsHalves(x.rows[m][i]));
        sums_[m][i / 2][i % 2 * 2] = pair.x;
        sums_[m][i / 2][i % 2 * 2 + 1] = pair.y;
      }
    }
  }
  __device__ __forceinline__ void Push(const WhitenedOperands<kDim>& of) {
#pragma unroll
    for (int m = 0; m < kTilesOfWarp; ++m) {
      MmaF16(sums_[m][0], of.rows[m], of.tile[0], of.tile[1]);
      MmaF16(sums_[m][1], of.rows[m], of.tile[2], of.tile[3]);
    }
  }
  // Of all blocks of the first half, into one of the second.
  __device__ __forceinline__ void PushFirstHalf(const std::byte* rows,
                                                const FeedbackOperands& feedback,
                                                int block,
                                                int lane) {
#pragma unroll
    for (int k = 0; k < AwareScratch<kDim>::kBlocks; ++k) {
      WhitenedOperands<kDim> of;
      of.Load(rows, feedback, k, block, lane);
      Push(of);
    }
  }
  // When all earlier blocks are pushed: y of the block, by the inverse of that on the diagonal.
  __device__ __forceinline__ void Close(const uint4& inverse) {
#pragma unroll
    for (int m = 0; m < kTilesOfWarp; ++m) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] =
            AsWord(__floats2half2_rn(sums_[m][i / 2][i % 2 * 2], sums_[m][i / 2][i % 2 * 2 + 1]));
        sums_[m][i / 2][i % 2 * 2] = sums_[m][i / 2][i % 2 * 2 + 1] = 0;
      }
      MmaF16(sums_[m][0], a, inverse.x, inverse.y);
      MmaF16(sums_[m][1], a, inverse.z, inverse.w);
    }
  }
  // y of channels 8 n + 2t and the next, of row g + 8 half of a tile.
  __device__ __forceinline__ float2 of(int m, int n, int half) const {
    return make_float2(sums_[m][n][2 * half], sums_[m][n][2 * half + 1]);
  }

 private:
  float sums_[kTilesOfWarp][2][4];  // [tile of sixteen rows, columns 8 n on].
};

// A block's operands of its head.
struct BlockReaders {
  uint4 inverse;
  uint2 readers;
  __half2 weight[2];  // Of the lane's channels 8 n + 2t and the next.

  __device__ __forceinline__ void Load(const RefitOperands& head, int block, int lane) {
    inverse = __ldg(reinterpret_cast<const uint4*>(head.whitening + block * 512) + lane);
    readers = __ldg(reinterpret_cast<const uint2*>(head.readers) + block * 32 + lane);
    const auto* weights = reinterpret_cast<const __half2*>(head.weights + block * 16) + lane % 4;
    weight[0] = weights[0];
    weight[1] = weights[4];
  }
};

// The sums of a warp's 32 rows, as the tensor cores have them.
template <int kDim, bool kRefit>
class RefitSums {};

template <int kDim>
class RefitSums<kDim, true> {
 public:
  using Tile = PageTile<kDim>;

  // Of a block of 16 channels whose y is `open` and whose errors are at `base` of the scratch. In
  // `rows`, which are as OpenKeyRow left them, y takes its place.
  __device__ __forceinline__ void AddBlock(std::byte* rows,
                                           const OpenBlock<kDim, true>& open,
                                           const BlockReaders& head,
                                           uint32_t base,
                                           int block,
                                           int lane) {
    uint32_t errors[kProblemChunks / 2][4];
#pragma unroll
    for (int pair = 0; pair < kProblemChunks / 2; ++pair) {
      AwareScratch<kDim>::LoadOperands(errors[pair], base, pair, lane);
    }
    const uint32_t to = SharedAddress(rows) + block * 32;
#pragma unroll
    for (int m = 0; m < kTilesOfWarp; ++m) {
      uint32_t y[4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 w = __half22float2(head.weight[n]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 of = open.of(m, n, half);
          y[2 * n + half] = AsWord(__floats2half2_rn(of.x, of.y));
          const float2 weighted = make_float2(of.x * w.x, of.y * w.y);
          squares_[m][half] =
              fmaf(weighted.x, weighted.x, fmaf(weighted.y, weighted.y, squares_[m][half]));
        }
      }
      StoreTile(y, to + m * kRowsOfWarp * Tile::kStride, Tile::kStride, lane);
      MmaF16(rows_with_readers_[m], y, head.readers.x, head.readers.y);
      uint32_t weighted[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const __half2 w = head.weight[i / 2];
        weighted[i] = AsWord(__hmul2(AsHalves(y[i]), __hmul2(w, w)));
      }
#pragma unroll
      for (int chunk = m * kChunksOfTile; chunk < (m + 1) * kChunksOfTile; ++chunk) {
        // Of the tile's rows the eight that the chunk's are among, and the readers in the place of
        // the others.
        const int half = HalfOfChunk(chunk);
        const uint32_t a[4] = {weighted[half], head.readers.x, weighted[2 + half], head.readers.y};
        MmaF16(with_errors_[chunk], a, errors[chunk / 2][chunk % 2 * 2],
               errors[chunk / 2][chunk % 2 * 2 + 1]);
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
        sums[4 * chunk + t] = make_float2(with_errors_[chunk][0], with_errors_[chunk][1]);
      }
      if (g < 2) {
        sums[32 * (1 + g) + 4 * chunk + t] =
            make_float2(with_errors_[chunk][2], with_errors_[chunk][3]);
      }
    }
#pragma unroll
    for (int m = 0; m < kTilesOfWarp; ++m) {
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
  static constexpr int kChunksOfTile = kProblemChunks / kTilesOfWarp;
  // Which eight of its tile's rows the four of a chunk are among.
  __device__ static constexpr int HalfOfChunk(int chunk) {
    return 4 * chunk % kRowsOfWarp / 8;
  }

  // [row g, problem], tiles of eight problems: half of a tile's rows, and then the readers.
  float with_errors_[kProblemChunks][4] = {};
  float rows_with_readers_[kTilesOfWarp][4] = {};
  float squares_[kTilesOfWarp][2] = {};  // Of the lane's share of y, weighted.
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
