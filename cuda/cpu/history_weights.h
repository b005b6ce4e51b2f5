// SPDX-License-Identifier: Apache-2.0
//
// The weights of INT2 pages' values, over the vector type `Simd` that the including file has
// defined: probabilities from scores, times the values' scales, as digits for integer products.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/cpu/history_batch.h"
#include "cuda/cpu/history_short_weights.h"
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

template <typename Simd>
class HistoryWeights {
  using Float = typename Simd::Float;
  using Int = typename Simd::Int;
  using Batch = HistoryBatch<Simd>;
  using Page = HistoryPage<Simd>;
  static constexpr size_t kLanes = Simd::kLanes;
  // Vectors at once: each step waits for the one before.
  static constexpr size_t kAtOnce = 4;

 public:
  // Of each row, over a group's pages; lanes still to be combined.
  struct Sums {
    Float p[kChunkRows];
    Float offset[kChunkRows];  // Of p * min_v.
  };

  // Makes the digits of a group's pages from scores and bases: whole numbers of 8 bits, or of 16 in
  // fine rows.
  static void Make(const HistoryGroup& group, Batch& batch, Sums& sums) {
    if constexpr (Simd::kHasShorts) {
      HistoryShortWeights<Simd>::Make(group, batch, sums.p, sums.offset);
      if (group.fine_rows.count == 0) {
        return;
      }
    }
    for (size_t row = 0; row < kChunkRows; ++row) {
      if (!Simd::kHasShorts || group.fine[row]) {
        sums.p[row] = sums.offset[row] = Simd::Zero();
      }
    }
    const Float factor = Simd::Set(254 / group.max_value_scale);
    for (size_t i = group.first; i < group.first + group.num_pages; ++i) {
      Page& page = batch.pages[i];
      alignas(64) float scale[kPageTokens];  // The group's largest being 254.
      for (size_t at = 0; at < kPageTokens; at += kLanes) {
        Simd::Store(Simd::Mul(Simd::Load(page.value_scale + at), factor), scale + at);
      }
      for (size_t row = 0; row < batch.num_rows; ++row) {
        const Row of{row, batch.queries->units[row], group.bases[row], group.fine[row]};
        if (Simd::kHasShorts && !of.fine) {
          continue;
        }
        for (size_t position = 0; position < kPageTokens; position += kAtOnce * kLanes) {
          MakeSome(of, position, scale, page, sums);
        }
      }
    }
  }

 private:
  struct Row {
    size_t row;
    float unit;
    float base;
    bool fine;
  };

  static void MakeSome(const Row& of, size_t position, const float* scale, Page& page, Sums& sums) {
    Float p[kAtOnce];
#pragma GCC unroll 4
    for (size_t v = 0; v < kAtOnce; ++v) {
      const Float score = Simd::Load(page.scores[of.row] + position + v * kLanes);
      p[v] = Simd::MulAdd(score, Simd::Set(of.unit), Simd::Set(-of.base));
    }
    Power(p);
    Float& sum = sums.p[of.row];
    Float& offset = sums.offset[of.row];
#pragma GCC unroll 4
    for (size_t v = 0; v < kAtOnce; ++v) {
      const size_t at = position + v * kLanes;
      sum = Simd::Add(sum, p[v]);
      offset = Simd::MulAdd(p[v], Simd::Load(page.value_min + at), offset);
      p[v] = of.fine ? Simd::Mul(p[v], Simd::Set(256)) : p[v];
      p[v] = Simd::MulAdd(p[v], Simd::Load(scale + at), Simd::Load(kRoundingOffsets.values + at));
    }
#pragma GCC unroll 4
    for (size_t v = 0; v < kAtOnce; ++v) {
      const size_t at = position + v * kLanes;
      const Int whole = Simd::Truncate(p[v]);
      if (of.fine) {
        Simd::StoreBytes(Simd::ShiftRight8(whole), page.digits[0][of.row] + at);
        Simd::StoreBytes(whole, page.digits[1][of.row] + at);
      } else {
        Simd::StoreBytes(whole, page.digits[0][of.row] + at);
      }
    }
  }

  // 2^x, relative error 8e-5, for x up to 0 or a little more; 2^-126 below that.
  static void Power(Float (&x)[kAtOnce]) {
    const Float rounding = Simd::Set(12582912.0f);  // 1.5 * 2^23: what is added to it is rounded.
    Float rounded[kAtOnce];
    Float y[kAtOnce];
#pragma GCC unroll 4
    for (size_t v = 0; v < kAtOnce; ++v) {
      x[v] = Simd::ClampPower(x[v]);
      rounded[v] = Simd::Add(x[v], rounding);
    }
#pragma GCC unroll 4
    for (size_t v = 0; v < kAtOnce; ++v) {
      x[v] = Simd::Sub(x[v], Simd::Sub(rounded[v], rounding));
      y[v] = Simd::MulAdd(x[v], Simd::Set(5.51716691e-2f), Simd::Set(2.42611122e-1f));
    }
#pragma GCC unroll 4
    for (size_t v = 0; v < kAtOnce; ++v) {
      y[v] = Simd::MulAdd(y[v], x[v], Simd::Set(6.93260985e-1f));
    }
#pragma GCC unroll 4
    for (size_t v = 0; v < kAtOnce; ++v) {
      y[v] = Simd::MulAdd(y[v], x[v], Simd::Set(9.99928074e-1f));
      x[v] = Simd::AddExponent(y[v], rounded[v]);
    }
  }
};

}  // namespace crumb::cpu
