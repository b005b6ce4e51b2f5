// SPDX-License-Identifier: Apache-2.0
//
// Rows of BF16 to two bits, the same bits as the CPU's: clip at an exact order statistic, one
// affine range a row, round to nearest.
//
// A warp takes sixteen rows as the tensor cores have them: lane (g, t) has rows g and g + 8, of
// either the channels 8 n + 2 t and 8 n + 2 t + 1, as pairs. So rows come straight from a product,
// and codes go straight into the page's words. What is known of the two rows are the halves of one
// word, so that one shuffle serves both.
//
// Magnitudes of bf16 are ordered like their 15 bits: the order statistic is found by bisection over
// those, counting by packed comparisons. Division is kept out of the elements: rounding is
// monotone, so each row has three bf16 values from which on the code is 1, 2 and 3, found exactly
// once a row. An H200 compares, shifts and selects at half the rate at which it multiplies and
// adds: so what is counted is added as bf16, and so are codes.
#pragma once

#include <cstdint>

#include "cuda/kernels/packed.cuh"
#include "cuda/kernels/page_rows.cuh"
#include "cuda/kernels/row_levels.cuh"

namespace crumb::gpu {

// Half `row` of a word, twice.
__device__ __forceinline__ __nv_bfloat162 BothOf(uint32_t halves, int row) {
  return AsPair(__byte_perm(halves, 0, row == 0 ? 0x1010 : 0x3232));
}
// Over the four lanes that share two rows. All three others are asked at a time: a warp waits for
// one shuffle, not for two after one another.
template <typename Combine>
__device__ __forceinline__ uint32_t ReduceQuad(uint32_t value, Combine&& combine) {
  const uint32_t a = __shfl_xor_sync(kFullWarp, value, 1);
  const uint32_t b = __shfl_xor_sync(kFullWarp, value, 2);
  const uint32_t c = __shfl_xor_sync(kFullWarp, value, 3);
  return combine(combine(value, a), combine(b, c));
}

// Bits of bf16, row g's in the low half and row g + 8's in the upper.
struct RowExtremes {
  uint32_t least;
  uint32_t greatest;
  uint32_t largest;  // Magnitude; 0x7f80 and more: the row holds inf or NaN.
};

template <int kDim>
struct RowPairs {
  static constexpr int kPairs = kDim / 8;
  // Of rows g and g + 8. In the order [2 k][0], [2 k][1], [2 k + 1][0], [2 k + 1][1] the operand A
  // of m16n8k16 for channels 16 k on.
  uint32_t words[kPairs][2];

  // Sixteen rows of a tile, from `rows` on.
  __device__ __forceinline__ void Load(const std::byte* rows, int lane) {
    const std::byte* operand = OperandRow(rows, PageTile<kDim>::kStride, lane);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      uint32_t a[4];
      LoadMatrices(a, operand + k * 32);
      words[2 * k][0] = a[0];
      words[2 * k][1] = a[1];
      words[2 * k + 1][0] = a[2];
      words[2 * k + 1][1] = a[3];
    }
  }

  // To sixteen rows of a tile, from `rows` on.
  __device__ __forceinline__ void Store(std::byte* rows, int lane) const {
    const uint32_t tile = SharedAddress(rows);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const uint32_t a[4] = {words[2 * k][0], words[2 * k][1], words[2 * k + 1][0],
                             words[2 * k + 1][1]};
      StoreTile(a, tile + k * 32, PageTile<kDim>::kStride, lane);
    }
  }

  // What a product leaves in a lane, rounded.
  __device__ __forceinline__ void Take(const float (&sums)[4 * kPairs]) {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      words[n][0] = PackBf16(sums[4 * n], sums[4 * n + 1]);
      words[n][1] = PackBf16(sums[4 * n + 2], sums[4 * n + 3]);
    }
  }

  // The extreme of either row by an order of the bits as 16-bit integers.
  template <typename Combine3>
  __device__ __forceinline__ uint32_t Extreme(Combine3&& combine) const {
    uint32_t of_row[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      uint32_t a = words[0][row];
      uint32_t b = words[1][row];
#pragma unroll
      for (int n = 2; n + 3 < kPairs; n += 4) {
        a = combine(a, words[n][row], words[n + 1][row]);
        b = combine(b, words[n + 2][row], words[n + 3][row]);
      }
      of_row[row] = combine(a, b, combine(b, words[kPairs - 2][row], words[kPairs - 1][row]));
    }
    const uint32_t low = LowHalves(of_row[0], of_row[1]);
    const uint32_t high = HighHalves(of_row[0], of_row[1]);
    return ReduceQuad(combine(low, high, high),
                      [&](uint32_t x, uint32_t y) { return combine(x, y, y); });
  }

  // Of bits as signed integers the greatest is the greatest number, and of unsigned ones the least,
  // where a row has both signs.
  __device__ __forceinline__ RowExtremes Extremes() const {
    RowExtremes result;
    result.greatest = Extreme([](auto a, auto b, auto c) { return __vimax3_s16x2(a, b, c); });
    result.least = Extreme([](auto a, auto b, auto c) { return __vimax3_u16x2(a, b, c); });
    const uint32_t has_one_sign = (result.greatest | ~result.least) & 0x80008000u;
    if (__any_sync(kFullWarp, has_one_sign != 0)) {
      // Then the number of least magnitude is the other extreme.
      const uint32_t nearest =
          Extreme([](auto a, auto b, auto c) { return __vimin3_u16x2(a, b, c); });
      const uint32_t all_negative = (result.greatest >> 15 & 0x00010001u) * 0xffffu;
      const uint32_t none_negative = (~result.least >> 15 & 0x00010001u) * 0xffffu;
      result.greatest = (result.greatest & ~all_negative) | (nearest & all_negative);
      result.least = (result.least & ~none_negative) | (nearest & none_negative);
    }
    const uint32_t least_magnitude = result.least & 0x7fff7fffu;
    result.largest =
        __vimax3_u16x2(result.greatest & 0x7fff7fffu, least_magnitude, least_magnitude);
    return result;
  }
};

// How many magnitudes of either row are at least `bits`, as fp16; exact, as all are at most 256.
// Bits of bf16 are compared as those of fp16, which has an instruction that takes magnitudes: the
// order is the same, but that what is above fp16's infinity reaches anything.
template <int kDim>
__device__ __forceinline__ uint32_t CountFrom(const RowPairs<kDim>& rows, uint32_t bits) {
  uint32_t of_row[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const __half2 bound = HalfOf(bits, row);
    __half2 counts[2];
#pragma unroll
    for (int n = 0; n < RowPairs<kDim>::kPairs; ++n) {
      const __half2 reaches = __hgeu2(__habs2(AsHalves(rows.words[n][row])), bound);
      counts[n % 2] = n < 2 ? reaches : __hadd2(counts[n % 2], reaches);
    }
    of_row[row] = AsWord(__hadd2(counts[0], counts[1]));
  }
  const auto add = [](uint32_t a, uint32_t b) { return AsWord(__hadd2(AsHalves(a), AsHalves(b))); };
  return ReduceQuad(add(LowHalves(of_row[0], of_row[1]), HighHalves(of_row[0], of_row[1])), add);
}

// Bits of the n-th largest magnitude of either row, 1 <= n <= kDim; `most` are the largest's, but
// at most fp16's largest: what is above that is found as that.
template <int kDim>
__device__ __forceinline__ uint32_t FindLargest(const RowPairs<kDim>& rows, int n, uint32_t most) {
  const __half2 wanted = __float2half2_rn(static_cast<float>(n));
  // A factor of four below the largest, nearly always; else anything below it.
  for (uint32_t width = 256;; width = 0x8000) {
    const uint32_t start = __viaddmax_s16x2(most, ((1 - width) & 0xffffu) * 0x10001u, 0u);
    uint32_t found = start;
#pragma unroll 1
    for (uint32_t step = width / 2 * 0x10001u; step != 0; step = step >> 2 & 0x3fff3fffu) {
#pragma unroll
      for (int turn = 0; turn < 2; ++turn) {  // Two at a time: a turn of the loop costs as well.
        const uint32_t bits = turn == 0 ? step : step >> 1 & 0x7fff7fffu;
        found += bits & __hge2_mask(AsHalves(CountFrom(rows, found + bits)), wanted);
      }
    }
    const uint32_t moved = found - start;  // No half borrows.
    const bool is_open = ((moved & 0xffffu) == 0 && (start & 0xffffu) != 0) ||
                         (moved >> 16 == 0 && start >> 16 != 0);
    if (!__any_sync(kFullWarp, is_open)) {
      return found;
    }
  }
}

// The bf16 values from which on a row's codes are 1, 2 and 3, in both halves.
struct CodeBounds {
  __nv_bfloat162 from[3];
};

// The codes of two words' halves, as halves of a word: 128 + a's code + 4 x b's, as bf16, whose low
// four bits are then those codes.
__device__ __forceinline__ uint32_t TwoCodes(uint32_t a,
                                             const CodeBounds& of_a,
                                             uint32_t b,
                                             const CodeBounds& of_b) {
  const __nv_bfloat162 four = AsPair(0x40804080u);
  __nv_bfloat162 sum = AsPair(0x43004300u);
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    sum = __hadd2(sum, __hge2(AsPair(a), of_a.from[i]));
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    sum = __hfma2(__hge2(AsPair(b), of_b.from[i]), four, sum);
  }
  return AsWord(sum);
}

// What rounding of a lane's two rows needs and leaves.
struct NearestRows {
  CodeBounds bounds[2];
  RowLevels levels;  // Of row g + 8 (t % 2).
  bool is_finite;    // That row.

  // That row's place in a page of which each warp has sixteen rows.
  static __device__ __forceinline__ int TokenOf(int warp, int lane) {
    return kRowsOfWarp * warp + lane / 4 + 8 * (lane % 2);
  }

  // Where codes begin, as four lanes have found it for their two rows, each for that row: lanes 0
  // and 1 where code 1 does, lanes 2 and 3 code 2, in the low half of `found`; all of them code 3,
  // in the upper one.
  static __device__ __forceinline__ int LowCode(int lane) { return 1 + lane % 4 / 2; }
  __device__ __forceinline__ void TakeBounds(uint32_t found) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t one_and_three = __shfl_sync(kFullWarp, found, i, 4);
      const uint32_t two = __shfl_sync(kFullWarp, found, 2 + i, 4);
      bounds[i] = {BothOf(one_and_three, 0), BothOf(two, 0), BothOf(one_and_three, 1)};
    }
  }
};

template <int kDim>
__device__ __forceinline__ NearestRows FindLevels(const RowPairs<kDim>& rows,
                                                  int clip_from_top,
                                                  int lane) {
  const RowExtremes extremes = rows.Extremes();
  // From here on each lane is for one row.
  const int row = lane % 2;
  const auto mine = [&](uint32_t halves) {
    return __byte_perm(halves, 0, row == 0 ? 0x4410 : 0x4432);
  };
  float tau = INFINITY;
  if (clip_from_top > 0) {
    const uint32_t most = __vimin3_u16x2(extremes.largest, 0x7bff7bffu, 0x7bff7bffu);
    tau = ClipThreshold(mine(FindLargest(rows, clip_from_top, most)));
  }
  NearestRows result;
  result.is_finite = mine(extremes.largest) < 0x7f80;
  result.levels =
      MakeLevels(FloatOfBf16(mine(extremes.least)), FloatOfBf16(mine(extremes.greatest)), tau);
  const CodeRange low = CodeRange::Of(result.levels, tau, NearestRows::LowCode(lane));
  const CodeRange high = CodeRange::Of(result.levels, tau, 3);
  const uint32_t found = low.First() | high.First() << 16;
  result.TakeBounds(found);
  return result;
}

}  // namespace crumb::gpu
