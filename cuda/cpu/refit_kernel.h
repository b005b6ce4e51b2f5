// SPDX-License-Identifier: Apache-2.0
//
// The refit of oscar-int2-tilted: a row's scale and minimum, its codes as they are, moved to where
// its error is least for the queries that attend to it. Over the vector type `Simd`, whose lanes
// are rows; each operation is rounded as in the twin (cuda/reference/demote.cc), which says what
// the names mean.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace crumb::cpu {

struct RefitArgs {
  size_t dim = 0;                     // A multiple of 32.
  const float* metric = nullptr;      // [dim, dim] symmetric.
  const float* query_mean = nullptr;  // [dim]
  const float* rows = nullptr;        // [dim][kLanes], as the three below; 64-byte aligned.
  float* rows_in_metric = nullptr;    // Scratch.
  float* tilts = nullptr;             // Scratch.
  float* column_sums = nullptr;       // Scratch [dim], the same for all rows.
};

template <typename Simd>
class RefitKernel {
 public:
  using Float = typename Simd::Float;
  struct Levels {
    Float scale;
    Float min;
  };

  // Once a metric.
  static void SumColumns(const RefitArgs& args) {
    for (size_t column = 0; column < args.dim; column += kLanes) {
      Float sum = Simd::Zero();
      for (size_t row = 0; row < args.dim; ++row) {
        sum = Simd::Add(sum, Simd::Load(args.metric + row * args.dim + column));
      }
      Simd::Store(sum, args.column_sums + column);
    }
  }

  // Takes in kLanes rows. Once for their ranges.
  explicit RefitKernel(const RefitArgs& args) : args_(args) {
    MultiplyByMetric();
    Float mean_score = Simd::Zero();
    for (size_t channel = 0; channel < args.dim; ++channel) {
      mean_score = Simd::Fma(Simd::Set(args.query_mean[channel]), Row(channel), mean_score);
    }
    const Float scale = Simd::Set(1 / std::sqrt(static_cast<float>(args.dim)));
    for (size_t channel = 0; channel < args.dim; ++channel) {
      const Float x = Row(channel);
      const Float x_m = Simd::Load(args.rows_in_metric + channel * kLanes);
      const Float ones_m = Simd::Set(args.column_sums[channel]);
      const Float mean = Simd::Set(args.query_mean[channel]);
      const Float tilt = Simd::Fma(scale, Simd::NegFma(mean_score, mean, x_m), mean);
      Simd::Store(tilt, args.tilts + channel * kLanes);
      ones2_ = Simd::Add(ones2_, ones_m);
      x_ones_ = Simd::Fma(x, ones_m, x_ones_);
      x2_ = Simd::Fma(x, x_m, x2_);
      tilt_ones_ = Simd::Add(tilt_ones_, tilt);
      tilt_x_ = Simd::Fma(tilt, x, tilt_x_);
    }
  }

  // `codes` [dim][kLanes]; `loss` in the metric as feedback has summed it, then in the readers'.
  void Refit(const uint8_t* codes, Levels* levels, Float* loss) const {
    const Float a = levels->scale;
    const Float b = levels->min;
    const Errors error = SumErrors(codes, *levels, *loss);

    const Float size = Simd::Add(Simd::Add(x2_, Simd::Mul(b, Simd::Mul(b, ones2_))), error.e2);
    const Float b_e1 = Simd::Mul(b, error.e1);
    const Float cross = Simd::Sub(Simd::Add(Simd::Mul(b, x_ones_), error.ex), b_e1);
    const Float v2 = Simd::Sub(size, Simd::Mul(Simd::Set(2), cross));
    const Float v1 = Simd::Sub(Simd::Sub(x_ones_, Simd::Mul(b, ones2_)), error.e1);
    const Float ve = Simd::Sub(Simd::Sub(error.ex, b_e1), error.e2);
    const Float vt = Simd::Sub(Simd::Sub(tilt_x_, Simd::Mul(b, tilt_ones_)), error.et);

    const Float vv = AddProduct(v2, vt, vt);
    const Float vo = AddProduct(v1, vt, tilt_ones_);
    const Float oo = AddProduct(ones2_, tilt_ones_, tilt_ones_);
    const Float ev = AddProduct(ve, vt, error.et);
    const Float eo = AddProduct(error.e1, tilt_ones_, error.et);
    const Float vv_oo = Simd::Mul(vv, oo);
    const Float determinant = Simd::Sub(vv_oo, Simd::Mul(vo, vo));
    const Float stretch = Simd::Div(Simd::Sub(Simd::Mul(ev, oo), Simd::Mul(eo, vo)), determinant);
    const auto if_determined = [&](Float x, Float otherwise) {
      const Float share = Simd::Set(kLeastShare);
      x = Simd::Select(Simd::Less(Simd::Mul(share, size), v2), x, otherwise);
      x = Simd::Select(Simd::Less(Simd::Mul(share, vv_oo), determinant), x, otherwise);
      return Simd::Select(Simd::Less(Simd::Abs(stretch), Simd::Set(kMostStretch)), x, otherwise);
    };
    levels->scale = if_determined(ToScale(Simd::Add(a, Simd::Mul(a, stretch))), a);
    const Float p = Simd::Div(Simd::Sub(levels->scale, a), a);
    const Float lift = Simd::Div(Simd::Sub(eo, Simd::Mul(p, vo)), oo);
    levels->min = if_determined(ToMin(Simd::Add(b, lift)), b);
    const Float r = Simd::Sub(levels->min, b);

    const Float gain = Simd::Add(Simd::Mul(p, ev), Simd::Mul(r, eo));
    const Float twice_p = Simd::Mul(Simd::Set(2), p);
    const Float curve =
        Simd::Add(Simd::Mul(Simd::Mul(p, p), vv),
                  Simd::Add(Simd::Mul(twice_p, Simd::Mul(r, vo)), Simd::Mul(Simd::Mul(r, r), oo)));
    const Float before = AddProduct(error.e2, error.et, error.et);
    *loss = Simd::Sub(before, Simd::Sub(Simd::Mul(Simd::Set(2), gain), curve));
  }

 private:
  static constexpr size_t kLanes = Simd::kLanes;
  static constexpr float kMaxHalf = 65504.0f;
  static constexpr float kMinScale = 1.0f / (1u << 24);
  static constexpr float kLeastShare = 1e-3f;
  static constexpr float kMostStretch = 0.5f;

  struct Errors {
    Float e2;
    Float ex;
    Float e1;
    Float et;
  };

  Float Row(size_t channel) const { return Simd::Load(args_.rows + channel * kLanes); }

  // Rounded twice, unlike Fma.
  static Float AddProduct(Float sum, Float a, Float b) { return Simd::Add(sum, Simd::Mul(a, b)); }

  static Float ToScale(Float x) {
    return Simd::Max(Simd::RoundToHalf(Simd::Min(x, Simd::Set(kMaxHalf))), Simd::Set(kMinScale));
  }
  static Float ToMin(Float x) {
    x = Simd::Max(Simd::Add(x, Simd::Zero()), Simd::Set(-kMaxHalf));
    return Simd::RoundToHalf(Simd::Min(x, Simd::Set(kMaxHalf)));
  }

  // kColumns of the product at a time, so that each row element loaded serves them all.
  void MultiplyByMetric() const {
    constexpr size_t kColumns = 8;
    for (size_t column = 0; column < args_.dim; column += kColumns) {
      Float sums[kColumns];
#pragma GCC unroll 8
      for (size_t i = 0; i < kColumns; ++i) {
        sums[i] = Simd::Zero();
      }
      for (size_t row = 0; row < args_.dim; ++row) {
        const Float x = Row(row);
        const float* weights = args_.metric + row * args_.dim + column;
#pragma GCC unroll 8
        for (size_t i = 0; i < kColumns; ++i) {
          sums[i] = Simd::Fma(x, Simd::Set(weights[i]), sums[i]);
        }
      }
#pragma GCC unroll 8
      for (size_t i = 0; i < kColumns; ++i) {
        Simd::Store(sums[i], args_.rows_in_metric + (column + i) * kLanes);
      }
    }
  }

  Errors SumErrors(const uint8_t* codes, const Levels& levels, Float loss) const {
    Errors sums{loss, Simd::Zero(), Simd::Zero(), Simd::Zero()};
    for (size_t channel = 0; channel < args_.dim; ++channel) {
      const size_t at = channel * kLanes;
      const Float level = AddProduct(levels.min, Simd::LoadBytes(codes + at), levels.scale);
      const Float error = Simd::Sub(Row(channel), level);
      sums.ex = Simd::Fma(error, Simd::Load(args_.rows_in_metric + at), sums.ex);
      sums.e1 = Simd::Fma(error, Simd::Set(args_.column_sums[channel]), sums.e1);
      sums.et = Simd::Fma(error, Simd::Load(args_.tilts + at), sums.et);
    }
    return sums;
  }

  const RefitArgs& args_;
  Float ones2_ = Simd::Zero();
  Float x_ones_ = Simd::Zero();
  Float x2_ = Simd::Zero();
  Float tilt_ones_ = Simd::Zero();
  Float tilt_x_ = Simd::Zero();
};

}  // namespace crumb::cpu
