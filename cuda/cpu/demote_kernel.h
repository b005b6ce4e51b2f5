// SPDX-License-Identifier: Apache-2.0
//
// Rounding of one page's rows to two bits, over the vector type `Simd` that the including file has
// defined. Rows are transposed, so that a vector's lanes are rows and the row's own steps, which
// depend on each other, run side by side for kLanes rows. Each operation is rounded as in the twin
// (cuda/reference/demote.cc), in the same order for each row, so the bytes are the same.
//
// Feedback, d^2/2 fused multiply-adds a row and range, is most of the work. Errors of kBlock
// channels are kept in registers; each later channel is then loaded once and takes them one after
// another, in their order. All ranges round a channel side by side, to hide the latency of one;
// kRanges of them, as registers allow, then go through the later channels together.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/cpu/deviation_kernel.h"
#include "cuda/cpu/refit_kernel.h"
#include "proto/base/bfloat16.h"
#include "proto/page/page_format.h"

namespace crumb::cpu {

struct DemoteArgs {
  const BFloat16* rows = nullptr;   // [kPageTokens, dim], finite.
  size_t dim = 0;                   // A multiple of 32, at most kMaxHeadDim.
  float clip = 0;                   // Without feedback: clip ratio, <= 0 for none.
  bool by_deviation = false;        // Without feedback: see deviation_kernel.h; else to nearest.
  const float* feedback = nullptr;  // [dim, dim] upper triangular; null: none.
  const float* ranges = nullptr;    // With feedback: [kNumRanges - 1] clip ratios, above 0.
  // With feedback, for a refit (see refit_kernel.h); null for none.
  const float* metric = nullptr;      // [dim, dim] symmetric.
  const float* query_mean = nullptr;  // [dim]
  float* scratch = nullptr;           // [kDemoteScratch * dim], 64-byte aligned.
  uint8_t* codes = nullptr;           // Out: [dim, kPageTokens], 64-byte aligned.
  uint16_t* scales = nullptr;         // Out: [kPageTokens] fp16.
  uint16_t* minima = nullptr;         // Out: [kPageTokens] fp16.
};
// Rows and their magnitudes, four ranges' copies and their codes, and the refit's three: 16 lanes.
inline constexpr size_t kDemoteScratch = size_t{1 + 1 + 4 + 1 + 3} * 16;

// The functions of one instruction set; as DemoteArgs says.
void DemoteRowsPortable(const DemoteArgs& args);
void DemoteRowsAvx2(const DemoteArgs& args);
void DemoteRowsAvx512(const DemoteArgs& args);

template <typename Simd>
class DemoteKernel {
 public:
  static void DemoteRows(const DemoteArgs& args) {
    if (args.metric != nullptr) {
      Refitter::SumColumns(ForRefit(args));
    }
    for (size_t token = 0; token < kPageTokens; token += kLanes) {
      LoadRows(args, token);
      if (args.feedback != nullptr) {
        RoundWithFeedback(args, token);
      } else if (args.by_deviation) {
        RoundByDeviation(args, token);
      } else {
        RoundToNearest(args, token);
      }
    }
  }

 private:
  using Float = typename Simd::Float;
  using Mask = typename Simd::Mask;
  static constexpr size_t kLanes = Simd::kLanes;
  static constexpr size_t kNumRanges = 4;
  // Channels whose errors stay in registers, and ranges that do: kBlock * kRanges errors, kRanges
  // rows of a channel.
  static constexpr size_t kBlock = 4;
  static constexpr size_t kRanges = Simd::kRegisters >= 32 ? 4 : 2;
  static constexpr float kMaxHalf = 65504.0f;
  static constexpr float kMinScale = 1.0f / (1u << 24);

  using Refitter = RefitKernel<Simd>;
  using Levels = typename Refitter::Levels;
  struct Range {
    Float low;
    Float high;
  };

  // ---- Scratch: [dim][kLanes] each.
  static float* Rows(const DemoteArgs& args) { return args.scratch; }
  static float* Stream(const DemoteArgs& args) { return args.scratch + args.dim * kLanes; }
  static float* Copies(const DemoteArgs& args) { return args.scratch + 2 * args.dim * kLanes; }
  static uint8_t* Codes(const DemoteArgs& args) {
    return reinterpret_cast<uint8_t*>(args.scratch + 6 * args.dim * kLanes);
  }
  static RefitArgs ForRefit(const DemoteArgs& args) {
    return {.dim = args.dim,
            .metric = args.metric,
            .query_mean = args.query_mean,
            .rows = Rows(args),
            .rows_in_metric = args.scratch + 7 * args.dim * kLanes,
            .tilts = args.scratch + 8 * args.dim * kLanes,
            .column_sums = args.scratch + 9 * args.dim * kLanes};
  }

  static void LoadRows(const DemoteArgs& args, size_t token) {
    const BFloat16* rows = args.rows + token * args.dim;
    for (size_t channel = 0; channel < args.dim; channel += kLanes) {
      Float x[kLanes];
#pragma GCC unroll 16
      for (size_t i = 0; i < kLanes; ++i) {
        x[i] = Simd::LoadBf16(rows + i * args.dim + channel);
      }
      Simd::Transpose(x);
#pragma GCC unroll 16
      for (size_t i = 0; i < kLanes; ++i) {
        Simd::Store(x[i], Rows(args) + (channel + i) * kLanes);
      }
    }
  }

  static Range FindRange(const DemoteArgs& args) {
    Range range{Simd::Load(Rows(args)), Simd::Load(Rows(args))};
    for (size_t channel = 1; channel < args.dim; ++channel) {
      const Float x = Simd::Load(Rows(args) + channel * kLanes);
      range.low = Simd::Min(range.low, x);
      range.high = Simd::Max(range.high, x);
    }
    return range;
  }

  static size_t RankFromTop(float ratio, size_t dim) {
    const auto index = static_cast<size_t>(ratio * static_cast<float>(dim));
    return dim - 1 - (index < dim ? index : dim - 1);
  }

  // The magnitudes of the given ranks (0 is the largest) of each row, as fp16. Each pass sorts the
  // kAtOnce largest out of the stream of those that are left.
  template <size_t kNumRanks>
  static void FindThresholds(const DemoteArgs& args,
                             const size_t (&ranks)[kNumRanks],
                             Float (&thresholds)[kNumRanks]) {
    constexpr size_t kAtOnce = 8;
    size_t last = 0;
    for (const size_t rank : ranks) {
      last = rank > last ? rank : last;
    }
    for (size_t first = 0; first <= last; first += kAtOnce) {
      Float largest[kAtOnce];
#pragma GCC unroll 8
      for (size_t i = 0; i < kAtOnce; ++i) {
        largest[i] = Simd::Set(-1);
      }
      for (size_t channel = 0; channel < args.dim; ++channel) {
        const size_t at = channel * kLanes;
        Float x =
            first == 0 ? Simd::Abs(Simd::Load(Rows(args) + at)) : Simd::Load(Stream(args) + at);
#pragma GCC unroll 8
        for (size_t i = 0; i < kAtOnce; ++i) {
          const Float larger = Simd::Max(largest[i], x);
          x = Simd::Min(largest[i], x);
          largest[i] = larger;
        }
        Simd::Store(x, Stream(args) + at);
      }
      alignas(64) float sorted[kAtOnce][kLanes];
#pragma GCC unroll 8
      for (size_t i = 0; i < kAtOnce; ++i) {
        Simd::Store(largest[i], sorted[i]);
      }
      for (size_t i = 0; i < kNumRanks; ++i) {
        if (ranks[i] >= first && ranks[i] < first + kAtOnce) {
          thresholds[i] = Simd::RoundToHalf(
              Simd::Min(Simd::Load(sorted[ranks[i] - first]), Simd::Set(kMaxHalf)));
        }
      }
    }
  }

  static Float Clamp(Float x, Float low, Float high) {
    return Simd::Min(Simd::Max(x, low), high);
  }
  static Float Negate(Float x) {
    return Simd::Sub(Simd::Zero(), x);
  }

  static Levels MakeLevels(const Range& range, Float threshold) {
    const Float low = Clamp(range.low, Negate(threshold), threshold);
    const Float high = Clamp(range.high, Negate(threshold), threshold);
    Levels levels{};
    levels.min = Simd::RoundToHalf(
        Clamp(Simd::Add(low, Simd::Zero()), Simd::Set(-kMaxHalf), Simd::Set(kMaxHalf)));
    const Float third = Simd::Div(Simd::Sub(high, levels.min), Simd::Set(3.0f));
    levels.scale =
        Simd::Max(Simd::RoundToHalf(Simd::Min(third, Simd::Set(kMaxHalf))), Simd::Set(kMinScale));
    return levels;
  }

  static Float CodeOf(Float x, const Levels& levels) {
    const Float step =
        Simd::Floor(Simd::Add(Simd::Div(Simd::Sub(x, levels.min), levels.scale), Simd::Set(0.5f)));
    return Simd::Min(Simd::Max(step, Simd::Zero()), Simd::Set(3.0f));  // A NaN becomes 0.
  }

  static void StoreLevels(const DemoteArgs& args, size_t token, const Levels& levels) {
    Simd::StoreHalf(levels.scale, args.scales + token);
    Simd::StoreHalf(levels.min, args.minima + token);
  }

  static void RoundByDeviation(const DemoteArgs& args, size_t token) {
    const auto levels =
        DeviationKernel<Simd>::Round(args.dim, Rows(args), args.codes + token, kPageTokens);
    StoreLevels(args, token, {levels.scale, levels.min});
  }

  static void RoundToNearest(const DemoteArgs& args, size_t token) {
    Float threshold[1] = {Simd::Set(__builtin_inff())};
    if (args.clip > 0) {
      const size_t rank[1] = {RankFromTop(args.clip, args.dim)};
      FindThresholds(args, rank, threshold);
    }
    const Levels levels = MakeLevels(FindRange(args), threshold[0]);
    const Float low = Negate(threshold[0]);
    for (size_t channel = 0; channel < args.dim; ++channel) {
      const Float x = Clamp(Simd::Load(Rows(args) + channel * kLanes), low, threshold[0]);
      Simd::StoreBytes(Simd::Truncate(CodeOf(x, levels)),
                       args.codes + channel * kPageTokens + token);
    }
    StoreLevels(args, token, levels);
  }

  static void RoundWithFeedback(const DemoteArgs& args, size_t token) {
    Float cuts[3];
    const size_t ranks[3] = {RankFromTop(args.ranges[0], args.dim),
                             RankFromTop(args.ranges[1], args.dim),
                             RankFromTop(args.ranges[2], args.dim)};
    FindThresholds(args, ranks, cuts);
    const Range range = FindRange(args);
    Levels levels[kNumRanges];
    levels[0] = MakeLevels(range, Simd::Set(__builtin_inff()));
    for (size_t i = 1; i < kNumRanges; ++i) {
      levels[i] = MakeLevels(range, cuts[i - 1]);
    }
    for (size_t channel = 0; channel < args.dim; ++channel) {
      const Float x = Simd::Load(Rows(args) + channel * kLanes);
      for (size_t i = 0; i < kNumRanges; ++i) {
        Simd::Store(x, Copies(args) + (channel * kNumRanges + i) * kLanes);
      }
    }
    Float losses[kNumRanges];
    FeedBack(args, levels, losses);
    if (args.metric != nullptr) {
      const RefitArgs refit = ForRefit(args);
      const Refitter refitter(refit);
      for (size_t i = 0; i < kNumRanges; ++i) {
        refitter.Refit(Codes(args) + i * args.dim * kLanes, &levels[i], &losses[i]);
      }
    }
    KeepBest(args, token, levels, losses);
  }

  // Rounds a copy of the rows to each range's levels. Codes [kNumRanges][dim][kLanes].
  static void FeedBack(const DemoteArgs& args,
                       const Levels (&levels)[kNumRanges],
                       Float (&losses)[kNumRanges]) {
    for (Float& loss : losses) {
      loss = Simd::Zero();
    }
    for (size_t begin = 0; begin < args.dim; begin += kBlock) {
      Float errors[kNumRanges][kBlock];
      RoundBlock(args, begin, levels, errors, losses);
      for (size_t first = 0; first < kNumRanges; first += kRanges) {
        TakeErrors(args, begin, first, errors);
      }
    }
  }

  // Channels [begin, begin + kBlock): each takes the errors of those before it and is rounded.
  static void RoundBlock(const DemoteArgs& args,
                         size_t begin,
                         const Levels (&levels)[kNumRanges],
                         Float (&errors)[kNumRanges][kBlock],
                         Float (&losses)[kNumRanges]) {
    const size_t dim = args.dim;
    const float* weights = args.feedback + begin * dim;
#pragma GCC unroll 8
    for (size_t step = 0; step < kBlock; ++step) {
      const size_t channel = begin + step;
      const Float diagonal = Simd::Set(weights[step * dim + channel]);
#pragma GCC unroll 4
      for (size_t i = 0; i < kNumRanges; ++i) {
        Float x = Simd::Load(Copies(args) + (channel * kNumRanges + i) * kLanes);
#pragma GCC unroll 8
        for (size_t before = 0; before < step; ++before) {
          x = Simd::NegFma(errors[i][before], Simd::Set(weights[before * dim + channel]), x);
        }
        const Float code = CodeOf(x, levels[i]);
        const Float level = Simd::Add(Simd::Mul(code, levels[i].scale), levels[i].min);
        errors[i][step] = Simd::Div(Simd::Sub(x, level), diagonal);
        losses[i] = Simd::Fma(errors[i][step], errors[i][step], losses[i]);
        Simd::StoreBytes(Simd::Truncate(code), Codes(args) + (i * dim + channel) * kLanes);
      }
    }
  }

  // Pushes the errors of a block into the channels behind it, for ranges [first, first + kRanges).
  static void TakeErrors(const DemoteArgs& args,
                         size_t begin,
                         size_t first,
                         const Float (&block)[kNumRanges][kBlock]) {
    const size_t dim = args.dim;
    const float* weights = args.feedback + begin * dim;
    Float errors[kRanges][kBlock];
#pragma GCC unroll 4
    for (size_t i = 0; i < kRanges; ++i) {
#pragma GCC unroll 8
      for (size_t step = 0; step < kBlock; ++step) {
        errors[i][step] = block[first + i][step];
      }
    }
    for (size_t channel = begin + kBlock; channel < dim; ++channel) {
      float* at = Copies(args) + (channel * kNumRanges + first) * kLanes;
      Float x[kRanges];
#pragma GCC unroll 4
      for (size_t i = 0; i < kRanges; ++i) {
        x[i] = Simd::Load(at + i * kLanes);
      }
#pragma GCC unroll 8
      for (size_t step = 0; step < kBlock; ++step) {
        const Float weight = Simd::Set(weights[step * dim + channel]);
#pragma GCC unroll 4
        for (size_t i = 0; i < kRanges; ++i) {
          x[i] = Simd::NegFma(errors[i][step], weight, x[i]);
        }
      }
#pragma GCC unroll 4
      for (size_t i = 0; i < kRanges; ++i) {
        Simd::Store(x[i], at + i * kLanes);
      }
    }
  }

  // For each row the levels and codes of its least loss, the first of equals.
  static void KeepBest(const DemoteArgs& args,
                       size_t token,
                       const Levels (&levels)[kNumRanges],
                       const Float (&losses)[kNumRanges]) {
    Float least = losses[0];
    Float best = Simd::Zero();
    Levels kept = levels[0];
    for (size_t i = 1; i < kNumRanges; ++i) {
      const Mask better = Simd::Less(losses[i], least);
      least = Simd::Select(better, losses[i], least);
      best = Simd::Select(better, Simd::Set(static_cast<float>(i)), best);
      kept = {Simd::Select(better, levels[i].scale, kept.scale),
              Simd::Select(better, levels[i].min, kept.min)};
    }
    StoreLevels(args, token, kept);
    uint8_t index[kLanes];
    Simd::StoreBytes(Simd::Truncate(best), index);
    uint8_t masks[kNumRanges][kLanes];
    for (size_t i = 0; i < kNumRanges; ++i) {
      for (size_t lane = 0; lane < kLanes; ++lane) {
        // NOLINTNEXTLINE(clang-analyzer-core.UndefinedBinaryOperatorResult): intrinsics wrote it.
        masks[i][lane] = index[lane] == i ? 0xff : 0;
      }
    }
    const uint8_t* codes = Codes(args);
    const size_t stride = args.dim * kLanes;
    for (size_t channel = 0; channel < args.dim; ++channel) {
      const uint8_t* from = codes + channel * kLanes;
      uint8_t* to = args.codes + channel * kPageTokens + token;
      for (size_t lane = 0; lane < kLanes; ++lane) {
        to[lane] = static_cast<uint8_t>((from[lane] & masks[0][lane]) |
                                        (from[stride + lane] & masks[1][lane]) |
                                        (from[2 * stride + lane] & masks[2][lane]) |
                                        (from[3 * stride + lane] & masks[3][lane]));
      }
    }
  }
};

}  // namespace crumb::cpu
