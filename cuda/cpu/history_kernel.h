// SPDX-License-Identifier: Apache-2.0
//
// Attention to one INT2 page, over the vector type `Simd` that the including file has defined.
//
// Codes enter products as the exact integers 0..3; queries and probabilities as fixed point of one
// or two base-256 digits, so that a product sum is whole numbers throughout and no element is ever
// made a float. Scale and minimum of the rows are folded in outside:
//
//   score  = unit * (scale_k * (q . code) + min_k * sum(q))
//   output = sum((p * scale_v) * code) + sum(p * min_v)
//
// Two digits (16 bits) where they can be seen, one where they cannot: a row that gives no token of
// the page as much as kFineShare of its probability so far, nor so much that the error of its score
// could be seen, is read with digit 0 of q and eight bits of p * scale_v. See
// docs/decisions/0020-digits-by-share.md for what that costs.
//
// Probabilities are 2^(score - max) of a maximum that lags: it moves only when a page's highest
// score is kHeadroom above it, so that weights need not wait for the page's own maximum and outputs
// are seldom rescaled.
//
// Cache lines of a page to come are asked for along the way, its key codes while keys are
// multiplied, its metadata while weights are made, its value codes while values are multiplied.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/cpu/history_products.h"
#include "cuda/cpu/split_attention_kernel.h"

namespace crumb::cpu {

inline constexpr float kFineShare = 1.0f / 256;
inline constexpr float kFineError = 1.0f / 8192;  // Of a share times its score's error.
inline constexpr float kHeadroom = 16;            // Of scores, in units of log 2.

// The last digit of p is rounded up by these, spread evenly over [0, 1): many small probabilities
// then keep their sum, which rounding to nearest would make 0.
struct RoundingOffsets {
  alignas(64) float values[kPageTokens];
};
constexpr RoundingOffsets MakeRoundingOffsets() {
  RoundingOffsets offsets{};
  for (uint32_t i = 0; i < kPageTokens; ++i) {
    uint32_t reversed = 0;
    for (uint32_t bit = 0; bit < 6; ++bit) {
      reversed |= ((i >> bit) & 1u) << (5 - bit);
    }
    offsets.values[i] = (static_cast<float>(reversed) + 0.5f) / kPageTokens;
  }
  return offsets;
}
inline constexpr RoundingOffsets kRoundingOffsets = MakeRoundingOffsets();

template <typename Simd>
class HistoryKernel {
 public:
  static void AttendPage(const PageArgs& page,
                         const FixedQueries& queries,
                         size_t num_rows,
                         ChunkState& state,
                         float* outputs) {
    switch (num_rows) {
      case 1:
        return AttendRows<1>(page, queries, state, outputs);
      case 2:
        return AttendRows<2>(page, queries, state, outputs);
      case 3:
        return AttendRows<3>(page, queries, state, outputs);
      default:
        return AttendRows<kChunkRows>(page, queries, state, outputs);
    }
  }

 private:
  using Float = typename Simd::Float;
  using Int = typename Simd::Int;
  using Products = HistoryProducts<Simd>;
  static constexpr size_t kLanes = Simd::kLanes;
  using Rows = Float[kChunkRows];  // One vector a row, lanes still to be combined.

  // Of one page; tokens by position.
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init)
  struct alignas(64) Work {
    float key_scale[kPageTokens];
    float key_min[kPageTokens];
    float value_scale[kPageTokens];
    float value_min[kPageTokens];
    int32_t products[kChunkRows][kPageTokens];
    float weights[kChunkRows][kPageTokens];      // p * scale_v
    uint8_t digits[2][kChunkRows][kPageTokens];  // The same, by digit.
    float units[2][ChunkState::kMaxLanes];       // What 1 of a digit is worth.
    float inverses[ChunkState::kMaxLanes];       // Of units[0].
    float max_key_scale;
    bool fine[kChunkRows];
  };
  // Of a chunk's weights for one page.
  struct Totals {
    Rows highest;  // Of the scores, in the queries' unit.
    Rows largest;  // Of the weights.
    Rows sum;
    Rows offset;
  };

  template <size_t kRows>
  static void AttendRows(const PageArgs& page,
                         const FixedQueries& queries,
                         ChunkState& state,
                         float* outputs) {
    Work work;  // NOLINT(cppcoreguidelines-pro-type-member-init): written before it is read.
    ReadMeta(page, work);
    Products::template MultiplyKeys<kRows>(page, queries.digits[0], 0, false, work.products);
    Totals totals;  // NOLINT(cppcoreguidelines-pro-type-member-init): as work.
    WeighRows<kRows>(queries, state, work, totals);
    const Float highest = HighestOfEach(queries, totals);
    if (!(Simd::ReduceMax(Simd::Sub(highest, Simd::Load(state.max))) <= kHeadroom)) {
      Rescale<kRows>(highest, PaddedValueDim(page.value_dim), state, outputs);
      WeighRows<kRows>(queries, state, work, totals);
    }
    const bool any_fine = FindFineRows<kRows>(highest, queries, state, work);
    for (size_t row = 0; any_fine && row < kRows; ++row) {
      if (work.fine[row]) {
        Products::template MultiplyKeys<1>(page, queries.digits[1], row, true, work.products);
        WeighRow(queries, 1, row, state, work, totals);
      }
    }
    AddTotals(totals, state);
    MakeDigits<kRows>(page, totals, work);
    Products::template MultiplyValues<kRows>(page, work.digits[0], work.units[0], 0, outputs);
    for (size_t row = 0; any_fine && row < kRows; ++row) {
      if (work.fine[row]) {
        Products::template MultiplyValues<1>(page, work.digits[1], work.units[1], row, outputs);
      }
    }
  }

  static void ReadMeta(const PageArgs& page, Work& work) {
    const std::byte* meta = page.block + kPageTokens / 4 * (page.key_dim + page.value_dim);
    Simd::SplitMeta(meta, work.key_scale, work.key_min);
    Simd::SplitMeta(meta + size_t{4} * kPageTokens, work.value_scale, work.value_min);
    Float largest = Simd::Zero();
    for (size_t i = 0; i < kPageTokens; i += kLanes) {
      const Float scale = Simd::Load(work.key_scale + i);
      largest = Simd::Max(largest, scale);
      if (i >= kPageTokens / 2) {  // Row half 1.
        Simd::Store(Simd::Mul(scale, Simd::Set(0.25f)), work.key_scale + i);
      }
    }
    work.max_key_scale = Simd::ReduceMax(largest);
  }

  template <size_t kRows>
  static void WeighRows(const FixedQueries& queries,
                        const ChunkState& state,
                        Work& work,
                        Totals& totals) {
#pragma GCC unroll 4
    for (size_t row = 0; row < kChunkRows; ++row) {
      if (row < kRows) {
        WeighRow(queries, 0, row, state, work, totals);
      } else {
        totals.highest[row] = totals.largest[row] = totals.sum[row] = totals.offset[row] =
            Simd::Zero();
      }
    }
  }

  // A row's probabilities and weights from its products, which hold the digits up to `digit`.
  static void WeighRow(const FixedQueries& queries,
                       size_t digit,
                       size_t row,
                       const ChunkState& state,
                       Work& work,
                       Totals& totals) {
    const Float unit = Simd::Set(queries.units[digit][row]);
    const Float query_sum = Simd::Set(queries.sums[digit][row]);
    const Float max = Simd::Set(-state.max[row]);
    Float highest = Simd::Set(-__builtin_inff());
    Float largest = Simd::Zero();
    Float sum = Simd::Zero();
    Float offset = Simd::Zero();
#pragma GCC unroll 4
    for (size_t i = 0; i < kPageTokens; i += kLanes) {
      const Float product = Simd::ToFloat(Simd::LoadInt(work.products[row] + i));
      const Float score = Simd::MulAdd(product, Simd::Load(work.key_scale + i),
                                       Simd::Mul(query_sum, Simd::Load(work.key_min + i)));
      highest = Simd::Max(highest, score);
      const Float p = Simd::Exp2Near(Simd::MulAdd(score, unit, max));
      const Float weight = Simd::Mul(p, Simd::Load(work.value_scale + i));
      sum = Simd::Add(sum, p);
      offset = Simd::MulAdd(p, Simd::Load(work.value_min + i), offset);
      largest = Simd::Max(largest, weight);
      Simd::Store(weight, work.weights[row] + i);
    }
    totals.highest[row] = highest;
    totals.largest[row] = largest;
    totals.sum[row] = sum;
    totals.offset[row] = offset;
  }

  // Lane r: row r's highest score.
  static Float HighestOfEach(const FixedQueries& queries, const Totals& totals) {
    return Simd::Mul(Simd::MaxOfEach(totals.highest), Simd::Load(queries.units[0]));
  }

  // Moves each row's maximum up to `highest`, where that is above it.
  template <size_t kRows>
  static void Rescale(Float highest, size_t stride, ChunkState& state, float* outputs) {
    alignas(64) float decays[ChunkState::kMaxLanes];
    const Float old_max = Simd::Load(state.max);
    const Float max = Simd::Max(old_max, highest);
    const Float decay = Simd::Exp2(Simd::Sub(old_max, max));
    Simd::Store(max, state.max);
    Simd::Store(Simd::Mul(Simd::Load(state.sum), decay), state.sum);
    Simd::Store(Simd::Mul(Simd::Load(state.offset), decay), state.offset);
    Simd::Store(decay, decays);
    for (size_t row = 0; row < kRows; ++row) {
      for (size_t i = row * stride; i < (row + 1) * stride; i += kLanes) {
        Simd::Store(Simd::Mul(Simd::Load(outputs + i), Simd::Set(decays[row])), outputs + i);
      }
    }
  }

  // Marks the rows that need two digits; whether there are any.
  template <size_t kRows>
  static bool FindFineRows(Float highest,
                           const FixedQueries& queries,
                           const ChunkState& state,
                           Work& work) {
    alignas(64) float growth[ChunkState::kMaxLanes];
    Simd::Store(Simd::Exp2(Simd::Sub(highest, Simd::Load(state.max))), growth);
    bool any = false;
    for (size_t row = 0; row < kRows; ++row) {
      const float error = queries.errors[row] * work.max_key_scale;
      const float share = growth[row] / state.sum[row];  // At the beginning: infinite.
      work.fine[row] = !(share <= kFineShare && share * error <= kFineError);  // A NaN is fine.
      any |= work.fine[row];
    }
    return any;
  }

  static void AddTotals(const Totals& totals, ChunkState& state) {
    Simd::Store(Simd::Add(Simd::Load(state.sum), Simd::SumOfEach(totals.sum)), state.sum);
    Simd::Store(Simd::Add(Simd::Load(state.offset), Simd::SumOfEach(totals.offset)), state.offset);
  }

  // Weights as whole numbers: of 8 bits, the largest of a row being 254, or of 16 in fine rows.
  template <size_t kRows>
  static void MakeDigits(const PageArgs& page, const Totals& totals, Work& work) {
    const Float largest = Simd::Max(Simd::Set(1e-30f), Simd::MaxOfEach(totals.largest));
    const Float unit = Simd::Mul(largest, Simd::Set(1.0f / 254));
    Simd::Store(unit, work.units[0]);
    Simd::Store(Simd::Mul(unit, Simd::Set(1.0f / 256)), work.units[1]);
    Simd::Store(Simd::Div(Simd::Set(254), largest), work.inverses);
    const std::byte* ahead =
        page.ahead + kPageTokens / 4 * (page.key_dim + page.value_dim);  // The metadata.
#pragma GCC unroll 4
    for (size_t row = 0; row < kRows; ++row) {
      __builtin_prefetch(ahead + 128 * row, 0, 2);
      __builtin_prefetch(ahead + 128 * row + 64, 0, 2);
      const bool fine = work.fine[row];
      const Float inverse = Simd::Set(work.inverses[row] * (fine ? 256.0f : 1.0f));
#pragma GCC unroll 4
      for (size_t i = 0; i < kPageTokens; i += kLanes) {
        const Int digits = Simd::Truncate(Simd::MulAdd(Simd::Load(work.weights[row] + i), inverse,
                                                       Simd::Load(kRoundingOffsets.values + i)));
        if (fine) {
          Simd::StoreBytes(Simd::ShiftRight8(digits), work.digits[0][row] + i);
          Simd::StoreBytes(digits, work.digits[1][row] + i);
        } else {
          Simd::StoreBytes(digits, work.digits[0][row] + i);
        }
      }
    }
  }
};

}  // namespace crumb::cpu
