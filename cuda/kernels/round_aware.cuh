// SPDX-License-Identifier: Apache-2.0
//
// Attention-aware rounding of keys (GPTQ, arXiv 2210.17323, applied to rows of K with the metric
// E[q q^T]): channel after channel, each error pushed into the channels that are still open, for
// two ranges; the range of least loss is kept. For oscar-int2-tilted each range is refitted first.
//
// In units of a range's scale every number is of the order of one, so it is done in packed fp16: a
// lane rounds its row in both ranges at once. Within 16 channels errors are pushed by one fused
// multiply-add each; what earlier channels bring to a block is a product on the tensor cores.
// Work a (row, range): d * 16 / 2 multiply-adds of d^2 / 2, two of them an instruction.
#pragma once

#include <cstdint>

#include "cuda/kernels/aware_scratch.cuh"
#include "cuda/kernels/feedback_operands.cuh"
#include "cuda/kernels/open_rows.cuh"
#include "cuda/kernels/refit_rows.cuh"

namespace crumb::gpu {

// Where a row's codes are until its range is known: [block][row][range], 16 codes a word; those of
// channels 4t + j have bits 8j + 2t on.
struct RangeCodes {
  uint2* words;

  __device__ __forceinline__ uint2& of(int block, int row) const { return words[block * 32 + row]; }

  // The words of lane (g, t) of the page's order, of the sixteen rows from `first` on, each of the
  // range that its bit of `second` says.
  template <int kDim>
  __device__ __forceinline__ void Select(int first,
                                         uint32_t second,
                                         int lane,
                                         uint32_t (&of_page)[kDim / 32]) const {
    const int row = first + lane / 4;
    const int shift = 2 * (lane % 4);
    const auto* upper = reinterpret_cast<const uint32_t*>(words + row) + (second >> row & 1);
    const auto* lower =
        reinterpret_cast<const uint32_t*>(words + row + 8) + (second >> (row + 8) & 1);
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      of_page[i] = (upper[2 * i * 64] >> shift & 0x03030303u) |
                   (lower[2 * i * 64] >> shift & 0x03030303u) << 2 |
                   (upper[(2 * i + 1) * 64] >> shift & 0x03030303u) << 4 |
                   (lower[(2 * i + 1) * 64] >> shift & 0x03030303u) << 6;
    }
  }
};

// What earlier blocks of the same half, from `first` on, push into a block: into its errors' sums,
// and with the refit into its open rows.
template <int kDim, bool kRefit>
__device__ __forceinline__ void AddPushed(uint32_t (&sums)[kProblemChunks][2],
                                          OpenBlock<kDim, kRefit>& open,
                                          const AwareScratch<kDim>& scratch,
                                          const FeedbackOperands& feedback,
                                          const std::byte* rows,
                                          int first,
                                          int block,
                                          int lane) {
#pragma unroll 1
  for (int k = first; k < block; ++k) {
    uint32_t a[4];
    feedback.LoadForErrors(a, k, block, lane);
    WhitenedOperands<kDim> whitened;
    if constexpr (kRefit) {
      whitened.Load(rows, feedback, k, block, lane);
    }
    uint32_t b[kProblemChunks / 2][4];
#pragma unroll
    for (int pair = 0; pair < kProblemChunks / 2; ++pair) {
      AwareScratch<kDim>::LoadOperands(b[pair], scratch.base(k - first), pair, lane);
    }
    if constexpr (kRefit) {
      open.Push(whitened);
    }
#pragma unroll
    for (int pair = 0; pair < kProblemChunks / 2; ++pair) {
      MmaF16Short(sums[2 * pair], a, b[pair][0], b[pair][1]);
      MmaF16Short(sums[2 * pair + 1], a, b[pair][2], b[pair][3]);
    }
  }
}

// When the first half is done: what it pushes into the second, in the place of its errors.
template <int kDim>
__device__ __forceinline__ void PushIntoSecondHalf(AwareScratch<kDim>& scratch,
                                                   const FeedbackOperands& feedback,
                                                   const uint32_t (&offsets)[kProblemChunks],
                                                   int lane) {
  constexpr int kBlocks = AwareScratch<kDim>::kBlocks;
  uint32_t sums[kBlocks][kProblemChunks][2];
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
    for (int chunk = 0; chunk < kProblemChunks; ++chunk) {
      sums[j][chunk][0] = sums[j][chunk][1] = offsets[chunk];
    }
  }
#pragma unroll 1
  for (int k = 0; k < kBlocks; ++k) {
    uint32_t b[kProblemChunks / 2][4];
#pragma unroll
    for (int pair = 0; pair < kProblemChunks / 2; ++pair) {
      AwareScratch<kDim>::LoadOperands(b[pair], scratch.base(k), pair, lane);
    }
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      uint32_t a[4];
      feedback.LoadForErrors(a, k, kBlocks + j, lane);
#pragma unroll
      for (int pair = 0; pair < kProblemChunks / 2; ++pair) {
        MmaF16Short(sums[j][2 * pair], a, b[pair][0], b[pair][1]);
        MmaF16Short(sums[j][2 * pair + 1], a, b[pair][2], b[pair][3]);
      }
    }
  }
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    AwareScratch<kDim>::StoreSums(sums[j], scratch.base(j), lane);
  }
  __syncwarp();
}

// What a block of 16 channels gives of the lane's row.
struct RoundedBlock {
  uint2 codes;  // As RangeCodes has them.
  float2 loss;  // In units of the scale and HeadScalars::loss_unit.
};

// Rounds the block's channels one after another; their errors go to `base`, the scratch's of the
// block. The levels are at -2, -1, 0 and 1, where fp16 is finest. `weights` [16, 16] as
// HeadRecord::diagonal().
template <int kDim>
__device__ __forceinline__ RoundedBlock
RoundBlock(__half2 (&z)[16], const std::byte* weights, uint32_t base, int lane) {
  const __half2 third = __float2half2_rn(1.0f / 3);
  const __half2 two_thirds = __float2half2_rn(2.0f / 3);
  const __half2 three = __float2half2_rn(3.0f);
  const __half2 whole = __float2half2_rn(1024.0f);  // What is added to it becomes a whole number.
  const __half2 middle = __float2half2_rn(1026.0f);
  __half2 loss = __float2half2_rn(0.0f);
  uint32_t four[4][2];  // Codes of four channels in the bytes of a word, of either range.
  uint32_t codes[4];    // 1024 and a code.
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    uint32_t row[8];
#pragma unroll
    for (int j = i / 8 * 4; j < 8; j += 4) {
      const uint4 of_row = *reinterpret_cast<const uint4*>(weights + i * 32 + j * 4);
      row[j] = of_row.x;
      row[j + 1] = of_row.y;
      row[j + 2] = of_row.z;
      row[j + 3] = of_row.w;
    }
    const __half2 share = __hfma2_sat(z[i], third, two_thirds);
    const __half2 code = __hfma2(share, three, whole);
    const __half2 error = __hsub2(z[i], __hsub2(code, middle));
    StoreShared(AwareScratch<kDim>::Word(base, i, lane), AsWord(error));
    const __half2 weighted = __hmul2(error, HalfOf(row[i / 2], i % 2));
    loss = __hfma2(weighted, weighted, loss);
#pragma unroll
    for (int j = i + 1; j < 16; ++j) {
      z[j] = __hfma2(error, HalfOf(row[j / 2], j % 2), z[j]);
    }
    codes[i % 4] = AsWord(code);
    if (i % 4 == 3) {
      const uint32_t low = __byte_perm(codes[0], codes[1], 0x6240);
      const uint32_t high = __byte_perm(codes[2], codes[3], 0x6240);
      four[i / 4][0] = LowHalves(low, high);
      four[i / 4][1] = HighHalves(low, high);
    }
  }
  const auto join = [&](int range) {
    return (four[0][range] | four[1][range] << 2) | (four[2][range] << 4 | four[3][range] << 6);
  };
  return {make_uint2(join(0), join(1)), __half22float2(loss)};
}

// The block's channels of the lane's row in its ranges' units, less what earlier blocks push:
// that, with the row's offset, is in the block's scratch.
template <int kDim>
__device__ __forceinline__ void LoadOpenChannels(
    const std::byte* row, __half2 inverse_scale, uint32_t base, int lane, __half2 (&z)[16]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 chunk = *reinterpret_cast<const uint4*>(row + 16 * i);
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t pushed = LoadShared(AwareScratch<kDim>::Word(base, 8 * i + j, lane));
      z[8 * i + j] = __hfma2(HalfOf(words[j / 2], j % 2), inverse_scale, AsHalves(pushed));
    }
  }
}

// What rounding leaves of the lane's row.
struct RoundedRow {
  RowLevels levels;
  bool takes_second;  // Of the two ranges.
};

// Of the range of less loss, the first of equals; a loss that is no number loses.
template <int kDim, bool kRefit>
__device__ __forceinline__ RoundedRow ChooseRange(const OpenRow& open,
                                                  float (&losses)[kRangesOfRow],
                                                  const RefitOperands& refit,
                                                  RefitSums<kDim, kRefit>& sums_of_refit,
                                                  AwareScratch<kDim>& scratch,
                                                  int lane) {
  RowLevels levels[kRangesOfRow];
#pragma unroll
  for (int i = 0; i < kRangesOfRow; ++i) {
    levels[i] = open.levels[i];
    losses[i] *= refit.loss_unit * (levels[i].scale * levels[i].scale);
  }
  if constexpr (kRefit) {
    RefitProducts products[kRangesOfRow];
    sums_of_refit.Finish(scratch, refit, open, lane, products);
#pragma unroll
    for (int i = 0; i < kRangesOfRow; ++i) {
      losses[i] = RefitLevels<kDim>(products[i], refit, losses[i], levels[i]);
    }
  }
  const auto or_infinite = [](float x) { return x == x ? x : INFINITY; };
  const bool takes_second = or_infinite(losses[1]) < or_infinite(losses[0]);
  return {takes_second ? levels[1] : levels[0], takes_second};
}

// 32 rows, one warp, each lane's as OpenKeyRow left it; `rows` are the warp's in the tile. Whose
// `codes` they are. `refit` is of oscar-int2-tilted's keys; then the rows are lost.
template <int kDim, bool kRefit>
__device__ __forceinline__ RoundedRow RoundAttentionAware(std::byte* rows,
                                                          const FeedbackOperands& feedback,
                                                          const RefitOperands& refit,
                                                          const OpenRow& open,
                                                          AwareScratch<kDim>& scratch,
                                                          const RangeCodes& codes,
                                                          int lane) {
  constexpr int kBlocks = AwareScratch<kDim>::kBlocks;
  const std::byte* row = rows + lane * int{PageTile<kDim>::kStride};
  const float inverse[2] = {1.0f / open.levels[0].scale, 1.0f / open.levels[1].scale};
  const __half2 inverse_scale = __floats2half2_rn(open.size * inverse[0], open.size * inverse[1]);
  const uint32_t offset =
      AsWord(__floats2half2_rn((open.center - open.levels[0].min) * inverse[0] - 2.0f,
                               (open.center - open.levels[1].min) * inverse[1] - 2.0f));
  uint32_t offsets[kProblemChunks];  // Of the problems that a product's lane has.
#pragma unroll
  for (int chunk = 0; chunk < kProblemChunks; ++chunk) {
    offsets[chunk] = __shfl_sync(kFullWarp, offset, 4 * chunk + lane % 4);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    StoreShared(AwareScratch<kDim>::Word(scratch.base(0), i, lane), offset);
  }
  __syncwarp();  // All rows are open.
  float losses[kRangesOfRow] = {};
  RefitSums<kDim, kRefit> sums_of_refit;
#pragma unroll 1
  for (int block = 0; block < 2 * kBlocks; ++block) {
    const int first = block < kBlocks ? 0 : kBlocks;  // Of the half.
    const uint32_t base = scratch.base(block - first);
    OpenBlock<kDim, kRefit> open_block;
    BlockReaders readers;
    if constexpr (kRefit) {
      readers.Load(refit, block, lane);
      open_block.Load(rows, block, lane);
      if (first > 0) {
        open_block.PushFirstHalf(rows, feedback, block, lane);
      }
    }
    if (block == kBlocks) {
      PushIntoSecondHalf(scratch, feedback, offsets, lane);
    } else if (block > first) {
      uint32_t sums[kProblemChunks][2];
      if (first == 0) {
#pragma unroll
        for (int chunk = 0; chunk < kProblemChunks; ++chunk) {
          sums[chunk][0] = sums[chunk][1] = offsets[chunk];
        }
      } else {
        AwareScratch<kDim>::LoadSums(sums, base, lane);
      }
      AddPushed(sums, open_block, scratch, feedback, rows, first, block, lane);
      AwareScratch<kDim>::StoreSums(sums, base, lane);
      __syncwarp();
    }
    __half2 z[16];
    LoadOpenChannels<kDim>(row + block * 32, inverse_scale, base, lane, z);
    if constexpr (kRefit) {
      open_block.Close(readers.inverse);
    }
    const RoundedBlock rounded =
        RoundBlock<kDim>(z, feedback.diagonal + block * HeadRecord::kDiagonalBytes, base, lane);
    codes.of(block, lane) = rounded.codes;
    losses[0] += rounded.loss.x;
    losses[1] += rounded.loss.y;
    __syncwarp();
    if constexpr (kRefit) {
      sums_of_refit.AddBlock(rows, open_block, readers, base, block, lane);
    }
  }
  return ChooseRange(open, losses, refit, sums_of_refit, scratch, lane);
}

}  // namespace crumb::gpu
