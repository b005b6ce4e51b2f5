// SPDX-License-Identifier: Apache-2.0
//
// The weights of INT2 pages' values in lanes of 16 bits, twice as many at once as floats: for rows
// that are read with one digit, over a vector type that has such lanes. An exponential is two
// lookups and a product, exact to 4e-4; what its fixed point loses is less than 2^-15 of the
// largest probability of the group.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/cpu/history_batch.h"

namespace crumb::cpu {

// As kRoundingOffsets of history_weights.h, in units of 1/128; any order does.
struct ShortRoundingOffsets {
  alignas(64) uint16_t values[kPageTokens];
};
constexpr ShortRoundingOffsets MakeShortRoundingOffsets() {
  ShortRoundingOffsets offsets{};
  for (uint32_t i = 0; i < kPageTokens; ++i) {
    offsets.values[i] = static_cast<uint16_t>(2 * i + 1);
  }
  return offsets;
}
inline constexpr ShortRoundingOffsets kShortRoundingOffsets = MakeShortRoundingOffsets();

template <typename Simd>
class HistoryShortWeights {
  using Float = typename Simd::Float;
  using Int = typename Simd::Int;
  using Batch = HistoryBatch<Simd>;
  using Page = HistoryPage<Simd>;
  static constexpr size_t kLanes = Simd::kLanes;
  static constexpr size_t kVectors = kPageTokens / (2 * kLanes);  // Of a row's tokens.

  // The largest minimum's. With it no sum over a batch leaves 32 bits: 2 products a lane, of
  // kVectors * kBatchPages vectors.
  static constexpr float kLargestMin = 4095;
  static_assert(2.0 * kVectors * kBatchPages * 32767 * kLargestMin < 2147483648.0);
  static constexpr float kOne = 32768;  // A probability of 1; one less is the most there is.

  // Of one page, in the order of Simd::PackShorts.
  struct Values {
    Int scale[kVectors];  // The group's largest being 254 * 256.
    Int min[kVectors];
  };

 public:
  // Digits of 8 bits, and each row's sums of p and p * min_v, lanes still to be combined. Of no use
  // for fine rows.
  static void Make(const HistoryGroup& group,
                   Batch& batch,
                   Float (&sums)[kChunkRows],
                   Float (&offsets)[kChunkRows]) {
    switch (batch.num_rows) {
      case 1:
        return MakeRows<1>(group, batch, sums, offsets);
      case 2:
        return MakeRows<2>(group, batch, sums, offsets);
      default:
        return MakeRows<kChunkRows>(group, batch, sums, offsets);
    }
  }

 private:
  static Values LoadValues(const HistoryGroup& group, const Page& page) {
    const Float of_scale = Simd::Set(254 * 256 / group.max_value_scale);
    const Float of_min = Simd::Set(kLargestMin / group.max_value_min);
    Values values{};
#pragma GCC unroll 2
    for (size_t v = 0; v < kVectors; ++v) {
      const float* scale = page.value_scale + v * 2 * kLanes;
      const float* min = page.value_min + v * 2 * kLanes;
      values.scale[v] = Simd::PackShorts(Simd::Mul(Simd::Load(scale), of_scale),
                                         Simd::Mul(Simd::Load(scale + kLanes), of_scale));
      values.min[v] = Simd::PackSignedShorts(Simd::Mul(Simd::Load(min), of_min),
                                             Simd::Mul(Simd::Load(min + kLanes), of_min));
    }
    return values;
  }

  template <size_t kRows>
  static void MakeRows(const HistoryGroup& group,
                       Batch& batch,
                       Float (&sums)[kChunkRows],
                       Float (&offsets)[kChunkRows]) {
    Int p[kRows];
    Int p_min[kRows];
#pragma GCC unroll 4
    for (size_t row = 0; row < kRows; ++row) {
      p[row] = p_min[row] = Simd::ZeroInt();
    }
    for (size_t i = group.first; i < group.first + group.num_pages; ++i) {
      Page& page = batch.pages[i];
      MakeDigits<kRows>(LoadValues(group, page), *batch.queries, group, page, p, p_min);
    }
    const Float of_min = Simd::Set(group.max_value_min / (kLargestMin * kOne));
#pragma GCC unroll 4
    for (size_t row = 0; row < kRows; ++row) {
      sums[row] = Simd::Mul(Simd::ToFloat(p[row]), Simd::Set(1 / kOne));
      offsets[row] = Simd::Mul(Simd::ToFloat(p_min[row]), of_min);
    }
  }

  // All rows step by step together: each step waits for the one before.
  template <size_t kRows>
  __attribute__((always_inline)) static void MakeDigits(const Values& values,
                                                        const FixedQueries& queries,
                                                        const HistoryGroup& group,
                                                        Page& page,
                                                        Int (&p_sums)[kRows],
                                                        Int (&p_min_sums)[kRows]) {
    Int x[kRows][kVectors];
#pragma GCC unroll 4
    for (size_t r = 0; r < kRows; ++r) {
      const Float slope = Simd::Set(-Simd::kPowerSteps * queries.units[r]);
      const Float start = Simd::Set(Simd::kPowerSteps * group.bases[r]);
#pragma GCC unroll 2
      for (size_t v = 0; v < kVectors; ++v) {
        const float* from = page.scores[r] + v * 2 * kLanes;
        x[r][v] = Simd::PackShorts(Simd::MulAdd(Simd::Load(from), slope, start),
                                   Simd::MulAdd(Simd::Load(from + kLanes), slope, start));
      }
    }
#pragma GCC unroll 4
    for (size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (size_t v = 0; v < kVectors; ++v) {
        x[r][v] = Simd::NegativePower(x[r][v]);
      }
    }
#pragma GCC unroll 4
    for (size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (size_t v = 0; v < kVectors; ++v) {
        const Int p = x[r][v];
        p_sums[r] = Simd::DotShorts(p_sums[r], p, Simd::SetShort(1));
        p_min_sums[r] = Simd::DotShorts(p_min_sums[r], p, values.min[v]);
        x[r][v] = Simd::MulShortsHigh(p, values.scale[v]);
      }
    }
#pragma GCC unroll 4
    for (size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (size_t v = 0; v < kVectors; ++v) {
        const Int offset = Simd::LoadInt(kShortRoundingOffsets.values + v * 2 * kLanes);
        x[r][v] = Simd::ShiftShortsRight7(Simd::AddShorts(x[r][v], offset));
      }
      Simd::StoreShortsAsBytes(x[r], page.digits[0][r]);
    }
  }
};

}  // namespace crumb::cpu
