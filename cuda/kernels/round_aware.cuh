// SPDX-License-Identifier: Apache-2.0
//
// Attention-aware rounding of keys (GPTQ, arXiv 2210.17323, applied to rows of K with the metric
// E[q q^T]): channel after channel, each error pushed into the channels that are still open, for
// four ranges; the range of least loss is kept. For oscar-int2-tilted each range is refitted first.
//
// Blocked: within 16 channels errors are pushed by one fused multiply-add each, a lane a (row,
// range); what all blocks before bring to a block is one product on the tensor cores, of errors and
// feedback in bf16. Work a (row, range): d * 16 / 2 multiply-adds of d^2 / 2. A warp has eight rows
// in four ranges: lane r + 8 p rounds row r in range p.
#pragma once

#include <cstdint>

#include "cuda/kernels/aware_scratch.cuh"
#include "cuda/kernels/refit_rows.cuh"
#include "cuda/kernels/round_rows.cuh"

namespace crumb::gpu {

struct AwareProblem {
  RowLevels levels;
  float loss;
};

// Levels of the lane's row and range.
template <int kDim>
__device__ __forceinline__ RowLevels AwareLevels(const RowShare<kDim>& share, int range) {
  const auto from_top = [](float ratio) {
    return kDim - min(static_cast<int>(ratio * static_cast<float>(kDim)), kDim - 1);
  };
  int cuts[3];
  share.template FindLargest<3>({from_top(0.98f), from_top(0.95f), from_top(0.90f)},
                                min(share.largest, 0x7f7f), cuts);
  const int cut = range == 1 ? cuts[0] : range == 2 ? cuts[1] : cuts[2];
  return MakeLevels(share.low, share.high, range == 0 ? INFINITY : ClipThreshold(cut));
}

// Sums over the blocks before `block` of errors times feedback, to scratch.sums.
template <int kDim>
__device__ __forceinline__ void PushEarlierErrors(AwareScratch<kDim>& scratch,
                                                  const std::byte* feedback,
                                                  int block,
                                                  int lane) {
  using Scratch = AwareScratch<kDim>;
  float sums[2][2][4] = {};
  const auto* tiles = reinterpret_cast<const uint4*>(
      feedback + HeadRecord::feedback_tile(0, static_cast<uint32_t>(block)));
  const std::byte* operand = OperandRow(scratch.errors, Scratch::kErrorStride, lane);
#pragma unroll 2
  for (int k = 0; k < block; ++k) {
    const uint4 b = __ldg(&tiles[k * 32 + lane]);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      uint32_t a[4];
      LoadMatrices(a, operand + m * 16 * Scratch::kErrorStride + k * 32);
      MmaBf16(sums[m][0], a, b.x, b.y);
      MmaBf16(sums[m][1], a, b.z, b.w);
    }
  }
  StoreSums(scratch, sums, lane);
}

// Rounds the 16 channels `x` one after another; leaves weighted errors in them and returns their
// row word. `weights` [16, 16]: the feedback's diagonal block, each row divided by its diagonal
// element, in whose place is the element's inverse.
__device__ __forceinline__ uint32_t RoundBlock(float (&x)[16],
                                               const float* weights,
                                               float inverse_scale,
                                               AwareProblem& problem) {
  // A sum with it is rounded to an integer, which is in the low bits.
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23.
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float row[16];
#pragma unroll
    for (int j = i / 4 * 4; j < 16; j += 4) {
      const float4 four = *reinterpret_cast<const float4*>(weights + i * 16 + j);
      row[j] = four.x;
      row[j + 1] = four.y;
      row[j + 2] = four.z;
      row[j + 3] = four.w;
    }
    const float above = x[i] - problem.levels.min;
    const float shifted = fminf(fmaxf(fmaf(above, inverse_scale, kMagic), kMagic), kMagic + 3.0f);
    const float error = fmaf(kMagic - shifted, problem.levels.scale, above);
    word += (__float_as_uint(shifted) & 3u) << (2 * i);
    const float weighted = error * row[i];
    problem.loss = fmaf(weighted, weighted, problem.loss);
    x[i] = weighted;
#pragma unroll
    for (int j = i + 1; j < 16; ++j) {
      x[j] = fmaf(-error, row[j], x[j]);
    }
  }
  return word;
}

// The lane's 16 channels of `row` less what earlier blocks push into them.
__device__ __forceinline__ void LoadOpenChannels(const std::byte* row,
                                                 const float* sums,
                                                 float (&x)[16]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 chunk = *reinterpret_cast<const uint4*>(row + 16 * i);
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 pushed = *reinterpret_cast<const float2*>(sums + 8 * i + 2 * j);
      x[8 * i + 2 * j] = __uint_as_float(words[j] << 16) - pushed.x;
      x[8 * i + 2 * j + 1] = __uint_as_float(words[j] & 0xffff0000u) - pushed.y;
    }
  }
}

// Eight rows from `first_token` on, one warp; false in lanes of rows that are not finite.
// `diagonal` and `feedback` as HeadRecord has them; `refit` is of oscar-int2-tilted's keys.
template <int kDim, bool kRefit>
__device__ __forceinline__ bool RoundAttentionAware(const std::byte* rows,
                                                    const float* diagonal,
                                                    const std::byte* feedback,
                                                    const RefitOperands& refit,
                                                    int first_token,
                                                    AwareScratch<kDim>& scratch,
                                                    uint32_t* row_words,
                                                    __half2* meta,
                                                    int lane) {
  using Tile = PageTile<kDim>;
  using Scratch = AwareScratch<kDim>;
  const int token = first_token + lane % 8;
  const int range = lane / 8;
  const std::byte* row = rows + token * Tile::kStride;
  AwareProblem problem;
  bool is_finite;
  {
    RowShare<kDim> share;
    share.Load(row, range);
    is_finite = share.largest < 0x7f80;
    problem.levels = AwareLevels(share, range);
    problem.loss = 0;
  }
  const float inverse_scale = 1.0f / problem.levels.scale;
  uint32_t* my_codes = scratch.codes + lane * Scratch::kWordStride;
#pragma unroll 1
  for (int block = 0; block < kDim / 16; ++block) {
    PushEarlierErrors(scratch, feedback, block, lane);
    __syncwarp();
    float x[16];
    LoadOpenChannels(row + block * 32, scratch.sums + lane * Scratch::kSumStride, x);
    my_codes[block] = RoundBlock(x, diagonal + block * 256, inverse_scale, problem);
    auto* errors =
        reinterpret_cast<uint4*>(scratch.errors + lane * Scratch::kErrorStride + block * 32);
    errors[0] = make_uint4(PackBf16(x[0], x[1]), PackBf16(x[2], x[3]), PackBf16(x[4], x[5]),
                           PackBf16(x[6], x[7]));
    errors[1] = make_uint4(PackBf16(x[8], x[9]), PackBf16(x[10], x[11]), PackBf16(x[12], x[13]),
                           PackBf16(x[14], x[15]));
    __syncwarp();
  }
  if constexpr (kRefit) {
    const RefitProducts products = MultiplyForRefit<kDim>(scratch, refit, lane);
    problem.loss = RefitLevels<kDim>(products, refit, problem.loss, problem.levels);
  }
  // The least loss of the row's four ranges, the first of equals; a loss that is no number loses.
  float least = problem.loss == problem.loss ? problem.loss : INFINITY;
  int best = range;
#pragma unroll
  for (int step = 8; step < 32; step *= 2) {
    const float other = __shfl_xor_sync(kFullWarp, least, step);
    const int other_range = __shfl_xor_sync(kFullWarp, best, step);
    if (other < least || (other == least && other_range < best)) {
      least = other;
      best = other_range;
    }
  }
  if (best == range) {
    for (int i = 0; i < kDim / 16; ++i) {
      row_words[token * Tile::kWordStride + i] = my_codes[i];
    }
    meta[Int2HeadBlock::MetaIndex(static_cast<uint32_t>(token))] =
        __floats2half2_rn(problem.levels.scale, problem.levels.min);
  }
  return is_finite;
}

}  // namespace crumb::gpu
