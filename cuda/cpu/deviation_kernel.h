// SPDX-License-Identifier: Apache-2.0
//
// Rounding of oscar-int2-lm: codes by a row's mean and deviation, then the scale and minimum under
// which the row comes back as large as it was. Over the vector type `Simd`, whose lanes are rows;
// each operation is rounded as in the twin (cuda/reference/demote.cc), which says what the names
// mean.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crumb::cpu {

template <typename Simd>
class DeviationKernel {
 public:
  using Float = typename Simd::Float;
  struct Levels {
    Float scale;
    Float min;
  };

  // kLanes rows `rows` [dim][kLanes], dim a multiple of 8, of which their means are taken; codes of
  // a channel go to codes + channel * code_stride.
  static Levels Round(size_t dim, float* rows, uint8_t* codes, size_t code_stride) {
    const Float high = Simd::Set(kMostBf16);
    const Float low = Simd::Set(-kMostBf16);
    const Float channels = Simd::Set(static_cast<float>(dim));
    const Float sum = SumOver(dim, [&](size_t channel) {
      const Float x = Simd::Min(Simd::Max(Simd::Load(rows + channel * kLanes), low), high);
      Simd::Store(x, rows + channel * kLanes);
      return x;
    });
    const Float mean = Simd::Div(sum, channels);
    const Float squares = SumOver(dim, [&](size_t channel) {
      const Float y = Simd::Sub(Simd::Load(rows + channel * kLanes), mean);
      Simd::Store(y, rows + channel * kLanes);
      return Simd::Mul(y, y);
    });

    const Float far_square = Simd::Mul(squares, Simd::Set(kFarSquare / static_cast<float>(dim)));
    const Float flat_squares = Simd::Set(static_cast<float>(dim) * (kMinScale * kMinScale));
    const auto is_flat = Simd::Less(squares, flat_squares);
    Float code_sum = Simd::Zero();
    const Float along = SumOver(dim, [&](size_t channel) {
      const Float y = Simd::Load(rows + channel * kLanes);
      const Float outer =
          Simd::Select(Simd::Less(far_square, Simd::Mul(y, y)), Simd::Set(1), Simd::Zero());
      Float code = Simd::Select(Simd::Less(y, Simd::Zero()), Simd::Sub(Simd::Set(1), outer),
                                Simd::Add(Simd::Set(2), outer));
      code = Simd::Select(is_flat, Simd::Zero(), code);
      code_sum = Simd::Add(code_sum, code);
      Simd::StoreBytes(Simd::Truncate(code), codes + channel * code_stride);
      return Simd::Mul(Simd::Abs(y), Simd::Add(outer, Simd::Set(0.5f)));
    });

    Levels levels{};
    const Float scale = Simd::Select(is_flat, Simd::Zero(), Simd::Div(squares, along));
    levels.scale =
        Simd::Max(Simd::RoundToHalf(Simd::Min(scale, Simd::Set(kMaxHalf))), Simd::Set(kMinScale));
    const Float min = Simd::Sub(mean, Simd::Mul(levels.scale, Simd::Div(code_sum, channels)));
    levels.min = Simd::RoundToHalf(Simd::Min(
        Simd::Max(Simd::Add(min, Simd::Zero()), Simd::Set(-kMaxHalf)), Simd::Set(kMaxHalf)));
    return levels;
  }

 private:
  static constexpr size_t kLanes = Simd::kLanes;
  static constexpr float kMaxHalf = 65504.0f;
  static constexpr float kMostBf16 = 65280.0f;
  static constexpr float kMinScale = 1.0f / (1u << 24);
  static constexpr float kFarSquare = 0.99142f;

  // In the twin's order.
  template <typename Term>
  static Float SumOver(size_t dim, Term term) {
    Float quarters[4] = {Simd::Zero(), Simd::Zero(), Simd::Zero(), Simd::Zero()};
    for (size_t channel = 0; channel < dim; channel += 8) {
#pragma GCC unroll 4
      for (size_t i = 0; i < 4; ++i) {
        const Float first = term(channel + 2 * i);
        quarters[i] = Simd::Add(quarters[i], Simd::Add(first, term(channel + 2 * i + 1)));
      }
    }
    return Simd::Add(Simd::Add(quarters[0], quarters[1]), Simd::Add(quarters[2], quarters[3]));
  }
};

}  // namespace crumb::cpu
