// SPDX-License-Identifier: Apache-2.0
//
// What history_kernel.h keeps of one INT2 page while it is attended to, and the making of its
// weights: probabilities from scores, times the values' scales, as digits for integer products.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/cpu/split_attention_kernel.h"

namespace crumb::cpu {

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

// One page against one chunk. Tokens are by position.
template <typename Simd>
struct alignas(64) HistoryWork {  // NOLINT(cppcoreguidelines-pro-type-member-init)
  using Float = typename Simd::Float;
  using Rows = Float[kChunkRows];  // One vector a row, lanes still to be combined.

  PageArgs page;
  const FixedQueries* queries;
  ChunkState* state;
  float* outputs;
  size_t num_rows;

  float key_scale[kPageTokens];
  float key_min[kPageTokens];
  float value_digits[kPageTokens];  // The scale, the page's largest being 254.
  float value_min[kPageTokens];
  float scores[kChunkRows][kPageTokens];       // In the queries' unit.
  uint8_t digits[2][kChunkRows][kPageTokens];  // p * scale_v, by digit.
  Rows highest;                                // Of the scores.
  Rows sum;                                    // Of p.
  Rows offset;                                 // Of p * min_v.
  float max_key_scale;
  float max_value_scale;
  float bases[ChunkState::kMaxLanes];     // Highest score of each row; p is 1 there.
  float growth[ChunkState::kMaxLanes];    // What that p is worth in the state.
  float units[2][ChunkState::kMaxLanes];  // What 1 of a digit is worth in the outputs.
  bool fine[kChunkRows];
  bool any_fine;
};

template <typename Simd>
class HistoryWeights {
  using Float = typename Simd::Float;
  using Int = typename Simd::Int;
  using Work = HistoryWork<Simd>;
  static constexpr size_t kLanes = Simd::kLanes;
  // Vectors at once: each step waits for the one before, and the processor looks but 64 operations
  // ahead. As many as there are registers for.
  static constexpr size_t kAtOnce = Simd::kRegisters / 4;
  static constexpr size_t kOfRow = kAtOnce * kLanes < kPageTokens ? kAtOnce : kPageTokens / kLanes;
  static constexpr size_t kRowsAtOnce = kAtOnce / kOfRow;

 public:
  // From scores and bases: sum, offset and digits, whole numbers of 8 bits, or of 16 in fine rows.
  static void Make(Work& work) {
    for (size_t row = 0; row < work.num_rows; row += kRowsAtOnce) {
      for (size_t position = 0; position < kPageTokens; position += kOfRow * kLanes) {
        MakeSome(row, position, work);
      }
    }
  }

 private:
  static void MakeSome(size_t first, size_t position, Work& work) {
    Float p[kAtOnce];
#pragma GCC unroll 8
    for (size_t v = 0; v < kAtOnce; ++v) {
      const size_t row = first + v / kOfRow;
      const Float score = Simd::Load(work.scores[row] + position + v % kOfRow * kLanes);
      p[v] = Simd::MulAdd(score, Simd::Set(work.queries->units[row]), Simd::Set(-work.bases[row]));
    }
    Power(p);
#pragma GCC unroll 8
    for (size_t v = 0; v < kAtOnce; ++v) {
      const size_t row = first + v / kOfRow;
      const size_t at = position + v % kOfRow * kLanes;
      const Float digits = Simd::Load(work.value_digits + at);
      work.sum[row] = Simd::Add(work.sum[row], p[v]);
      work.offset[row] = Simd::MulAdd(p[v], Simd::Load(work.value_min + at), work.offset[row]);
      p[v] = work.fine[row] ? Simd::Mul(p[v], Simd::Set(256)) : p[v];
      p[v] = Simd::MulAdd(p[v], digits, Simd::Load(kRoundingOffsets.values + at));
    }
#pragma GCC unroll 8
    for (size_t v = 0; v < kAtOnce; ++v) {
      const size_t row = first + v / kOfRow;
      const size_t at = position + v % kOfRow * kLanes;
      const Int whole = Simd::Truncate(p[v]);
      if (work.fine[row]) {
        Simd::StoreBytes(Simd::ShiftRight8(whole), work.digits[0][row] + at);
        Simd::StoreBytes(whole, work.digits[1][row] + at);
      } else {
        Simd::StoreBytes(whole, work.digits[0][row] + at);
      }
    }
  }

  // 2^x, relative error 8e-5, for x up to 0 or a little more; 2^-126 below that.
  static void Power(Float (&x)[kAtOnce]) {
    const Float rounding = Simd::Set(12582912.0f);  // 1.5 * 2^23: what is added to it is rounded.
    Float rounded[kAtOnce];
    Float y[kAtOnce];
#pragma GCC unroll 8
    for (size_t v = 0; v < kAtOnce; ++v) {
      x[v] = Simd::ClampPower(x[v]);
      rounded[v] = Simd::Add(x[v], rounding);
    }
#pragma GCC unroll 8
    for (size_t v = 0; v < kAtOnce; ++v) {
      x[v] = Simd::Sub(x[v], Simd::Sub(rounded[v], rounding));
      y[v] = Simd::MulAdd(x[v], Simd::Set(5.51716691e-2f), Simd::Set(2.42611122e-1f));
    }
#pragma GCC unroll 8
    for (size_t v = 0; v < kAtOnce; ++v) {
      y[v] = Simd::MulAdd(y[v], x[v], Simd::Set(6.93260985e-1f));
    }
#pragma GCC unroll 8
    for (size_t v = 0; v < kAtOnce; ++v) {
      y[v] = Simd::MulAdd(y[v], x[v], Simd::Set(9.99928074e-1f));
      x[v] = Simd::AddExponent(y[v], rounded[v]);
    }
  }
};

}  // namespace crumb::cpu
