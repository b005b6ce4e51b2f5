// SPDX-License-Identifier: Apache-2.0
//
// Attention-aware rounding of keys (GPTQ, arXiv 2210.17323, applied to rows of K with the metric
// E[q q^T]): channel after channel, each error pushed into the channels that are still open, for
// four ranges; the range of least loss is kept. For oscar-int2-tilted each range is refitted first.
//
// In units of a range's scale every number is of the order of one, so it is done in packed fp16: a
// lane rounds its row in two ranges at once. Within 16 channels errors are pushed by one fused
// multiply-add each; what all blocks before bring to a block is one product on the tensor cores.
// Work a (row, range): d * 16 / 2 multiply-adds of d^2 / 2, two of them an instruction.
#pragma once

#include <cstdint>

#include "cuda/kernels/aware_scratch.cuh"
#include "cuda/kernels/open_rows.cuh"
#include "cuda/kernels/refit_rows.cuh"

namespace crumb::gpu {

// Sums over the blocks before `block` of errors times feedback, to where its errors will be.
template <int kDim>
__device__ __forceinline__ void PushEarlierErrors(AwareScratch<kDim>& scratch,
                                                  const std::byte* feedback,
                                                  int block,
                                                  int lane) {
  using Scratch = AwareScratch<kDim>;
  constexpr int kChunks = 8;  // Of eight problems.
  uint32_t sums[kChunks][2] = {};
  const auto* tile = reinterpret_cast<const uint4*>(
                         feedback + HeadRecord::feedback_tile(0, static_cast<uint32_t>(block))) +
                     lane;
  uint4 next = __ldg(tile);
  uint32_t base = scratch.base(0);
#pragma unroll 2
  for (int k = 0; k < block; ++k) {
    const uint4 a = next;
    tile += 32;
    if (k + 1 < block) {
      next = __ldg(tile);
    }
#pragma unroll
    for (int pair = 0; pair < kChunks / 2; ++pair) {
      uint32_t b[4];
      Scratch::LoadOperands(b, base, pair, lane);
      MmaF16Short(sums[2 * pair], a, b[0], b[1]);
      MmaF16Short(sums[2 * pair + 1], a, b[2], b[3]);
    }
    base += 16 * Scratch::kChannelBytes;
  }
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      StoreShared(Scratch::SumWord(base, chunk, half, lane), sums[chunk][half]);
    }
  }
}

// What one block of 16 channels gives of the lane's two problems.
struct RoundedBlock {
  uint32_t words[kProblemsOfLane];  // Row words.
  float2 loss;                      // In units of the scale and HeadScalars::loss_unit.
};

// Rounds the block's channels one after another; their errors go to `scratch`. The levels are at
// -2, -1, 0 and 1, where fp16 is finest. `weights` [16, 16] as HeadRecord::diagonal(); `base` is
// the scratch's of the block.
template <int kDim>
__device__ __forceinline__ RoundedBlock
RoundBlock(__half2 (&z)[16], const std::byte* weights, uint32_t base, int lane) {
  const __half2 third = __float2half2_rn(1.0f / 3);
  const __half2 two_thirds = __float2half2_rn(2.0f / 3);
  const __half2 three = __float2half2_rn(3.0f);
  // A sum beyond 1024 is rounded to a whole number.
  const __half2 whole = __float2half2_rn(1536.0f);
  const __half2 lowest = __float2half2_rn(1534.0f);
  __half2 loss = __float2half2_rn(0.0f);
  __half2 codes[4];  // Of four channels each: 1024 and the codes as digits, in the low byte.
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    uint32_t row[8];
#pragma unroll
    for (int j = i / 8 * 4; j < 8; j += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(weights + i * 32 + j * 4);
      row[j] = four.x;
      row[j + 1] = four.y;
      row[j + 2] = four.z;
      row[j + 3] = four.w;
    }
    const __half2 share = __hfma2_sat(z[i], third, two_thirds);
    const __half2 level = __hsub2(__hfma2(share, three, lowest), whole);
    const __half2 error = __hsub2(z[i], level);
    StoreShared(AwareScratch<kDim>::Word(base, i, lane), AsWord(error));
    const __half2 before = i % 4 == 0 ? __float2half2_rn(1024.0f + 2 * 85) : codes[i / 4];
    codes[i / 4] = __hfma2(level, __float2half2_rn(static_cast<float>(1 << (2 * (i % 4)))), before);
    const __half2 weighted = __hmul2(error, HalfOf(row[i / 2], i % 2));
    loss = __hfma2(weighted, weighted, loss);
#pragma unroll
    for (int j = i + 1; j < 16; ++j) {
      z[j] = __hfma2(__hneg2(error), HalfOf(row[j / 2], j % 2), z[j]);
    }
  }
  const uint32_t first = __byte_perm(AsWord(codes[0]), AsWord(codes[1]), 0x6240);
  const uint32_t second = __byte_perm(AsWord(codes[2]), AsWord(codes[3]), 0x6240);
  return {{__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632)},
          __half22float2(loss)};
}

// The block's channels of the lane's row in its ranges' units, less what earlier blocks push.
template <int kDim>
__device__ __forceinline__ void LoadOpenChannels(const std::byte* row,
                                                 __half2 inverse_scale,
                                                 __half2 offset,
                                                 uint32_t base,
                                                 int block,
                                                 int lane,
                                                 __half2 (&z)[16]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 chunk = *reinterpret_cast<const uint4*>(row + block * 32 + 16 * i);
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      z[8 * i + j] = __hfma2(HalfOf(words[j / 2], j % 2), inverse_scale, offset);
    }
  }
  if (block > 0) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      z[i] = __hsub2(z[i], AsHalves(LoadShared(AwareScratch<kDim>::Word(base, i, lane))));
    }
  }
}

// Sixteen rows, which OpenRows has prepared, one warp. `diagonal` and `feedback` as HeadRecord has
// them; `refit` is of oscar-int2-tilted's keys. Of the tile, the codes of all ranges take the place
// of the rows.
template <int kDim, bool kRefit>
__device__ __forceinline__ void RoundAttentionAware(std::byte* rows,
                                                    const std::byte* diagonal,
                                                    const std::byte* feedback,
                                                    const RefitOperands& refit,
                                                    OpenRow open,
                                                    int first_token,
                                                    AwareScratch<kDim>& scratch,
                                                    uint32_t* row_words,
                                                    __half2* meta,
                                                    int lane) {
  using Tile = PageTile<kDim>;
  constexpr int kBlocks = kDim / 16;
  const int token = first_token + lane % kRowsOfWarp;
  const int pair = lane / kRowsOfWarp;
  std::byte* row = rows + token * Tile::kStride;
  const float inverse[2] = {1.0f / open.levels[0].scale, 1.0f / open.levels[1].scale};
  const __half2 inverse_scale = __floats2half2_rn(open.size * inverse[0], open.size * inverse[1]);
  const __half2 offset = __floats2half2_rn((open.center - open.levels[0].min) * inverse[0] - 2.0f,
                                           (open.center - open.levels[1].min) * inverse[1] - 2.0f);
  float losses[kProblemsOfLane] = {};
#pragma unroll 1
  for (int block = 0; block < kBlocks; ++block) {
    if (block > 0) {
      PushEarlierErrors(scratch, feedback, block, lane);
      __syncwarp();
    }
    __half2 z[16];
    const uint32_t base = scratch.base(block);
    LoadOpenChannels<kDim>(row, inverse_scale, offset, base, block, lane, z);
    __syncwarp();  // The row's other lane has read these channels too: codes go there.
    const RoundedBlock rounded =
        RoundBlock<kDim>(z, diagonal + block * HeadRecord::kDiagonalBytes, base, lane);
    *reinterpret_cast<uint2*>(row + block * 32 + pair * 8) =
        make_uint2(rounded.words[0], rounded.words[1]);
    losses[0] += rounded.loss.x;
    losses[1] += rounded.loss.y;
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < kProblemsOfLane; ++i) {
    losses[i] *= refit.loss_unit * (open.levels[i].scale * open.levels[i].scale);
  }
  if constexpr (kRefit) {
    RefitProducts products[kProblemsOfLane];
    MultiplyForRefit(scratch, refit, open, token, lane, products);
#pragma unroll
    for (int i = 0; i < kProblemsOfLane; ++i) {
      losses[i] = RefitLevels<kDim>(products[i], refit, losses[i], open.levels[i]);
    }
  }
  // The least loss of the row's four ranges, the first of equals; a loss that is no number loses.
  const auto or_infinite = [](float x) { return x == x ? x : INFINITY; };
  const bool takes_second = or_infinite(losses[1]) < or_infinite(losses[0]);
  const RowLevels levels = takes_second ? open.levels[1] : open.levels[0];
  const float least = or_infinite(takes_second ? losses[1] : losses[0]);
  const float other = __shfl_xor_sync(kFullWarp, least, kRowsOfWarp);
  const bool is_best = pair == 0 ? least <= other : least < other;
  const int range = 2 * pair + (takes_second ? 1 : 0);
  const int others_range = __shfl_xor_sync(kFullWarp, range, kRowsOfWarp);
  const int best = is_best ? range : others_range;
#pragma unroll
  for (int i = 0; i < kBlocks; i += 2) {
    row_words[token * Tile::kWordStride + i + pair] =
        *reinterpret_cast<const uint32_t*>(row + (i + pair) * 32 + best * 4);
  }
  if (is_best) {
    meta[Int2HeadBlock::MetaIndex(static_cast<uint32_t>(token))] =
        __floats2half2_rn(levels.scale, levels.min);
  }
}

}  // namespace crumb::gpu
