// SPDX-License-Identifier: Apache-2.0
//
// Attention to INT2 pages, over the vector type `Simd` that the including file has defined.
//
// Codes enter products as the exact integers 0..3; queries and probabilities as fixed point of one
// or two base-256 digits, so that a product sum is whole numbers throughout and no element is ever
// made a float. Scale and minimum of the rows are folded in outside:
//
//   score  = unit * (scale_k * (q . code) + min_k * sum(q))
//   output = sum((p * scale_v) * code) + sum(p * min_v)
//
// Two digits (16 bits) where they can be seen, one where they cannot: a row that gives no token of
// the page as much as kFineShare of its probability so far (or of what a few pages looked at
// beforehand promise), nor so much that the error of its score could be seen, is read with digit 0
// of q and eight bits of p * scale_v. See
// docs/decisions/0020-digits-by-share.md for what that costs.
//
// Probabilities of a page are 2^(score - highest) of its own highest score, so that their digits
// mean the same wherever the page stands; what the page adds is worth 2^(highest - max) of a
// maximum that lags: it moves only when a page's highest score is kHeadroom above it, so that
// outputs are seldom rescaled.
//
// A page's values are multiplied after the next page's keys. Between its own keys and values stand
// steps that wait for each other (the highest score, what the page is worth, what 1 of a digit is
// worth), and the processor finds products to do meanwhile.
//
// Pages lie anywhere in memory, so no stream is there for the processor to see. They are asked for
// in two steps. Their addresses are translated a batch at a time: a prefetch whose translation is
// not at hand holds up the instructions behind it, but several wait side by side. Their lines are
// fetched along the way, key codes while keys are multiplied, value codes while values are:
// together they would fill the queue of misses. See
// docs/decisions/0021-fetching-scattered-pages.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/cpu/history_products.h"
#include "cuda/cpu/history_weights.h"
#include "cuda/cpu/split_attention_kernel.h"

namespace crumb::cpu {

inline constexpr float kFineShare = 1.0f / 512;
inline constexpr float kFineError = 1.0f / 8192;  // Of a share times its score's error.
inline constexpr float kHeadroom = 16;            // Of scores, in units of log 2.

inline constexpr size_t kSampledPages = 8;
inline constexpr size_t kPagesAhead = 2;
inline constexpr size_t kTranslationBatch = 16;
inline constexpr size_t kMemoryPage = 4096;

template <typename Simd>
class HistoryKernel {
 public:
  static void Attend(const HistoryArgs& args) {
    Work works[2] = {};
    Work* last = nullptr;
    Work* next = works;
    ExpectSums(args, *next);
    TranslateAhead(args, 0);
    for (size_t i = 0; i < args.num_pages; ++i) {
      if (i % kTranslationBatch == 0) {
        TranslateAhead(args, i + kTranslationBatch);
      }
      const size_t ahead = i + kPagesAhead < args.num_pages ? i + kPagesAhead : args.num_pages - 1;
      const PageArgs page{args.key_dim, args.value_dim, args.pages[i], args.pages[ahead]};
      for (size_t chunk = 0; chunk * kChunkRows < args.num_rows; ++chunk) {
        Begin(args, page, chunk, *next);
        Score(*next);
        if (last != nullptr) {
          Finish(*last);
        }
        Place(*next);
        last = next;
        next = last == works ? works + 1 : works;
      }
    }
    Finish(*last);
  }

 private:
  using Float = typename Simd::Float;
  using Int = typename Simd::Int;
  using Products = HistoryProducts<Simd>;
  using Weights = HistoryWeights<Simd>;
  using Work = HistoryWork<Simd>;
  static constexpr size_t kLanes = Simd::kLanes;

  // Looks at a few pages of many, so that the first ones are not read as if no others came: as many
  // as there are times the least of those, and half of that, will hardly be more than the sum.
  static void ExpectSums(const HistoryArgs& args, Work& work) {
    if (args.num_pages < 8 * kSampledPages) {
      return;
    }
    const float num_pages = __builtin_log2f(static_cast<float>(args.num_pages) / 2);
    for (size_t chunk = 0; chunk * kChunkRows < args.num_rows; ++chunk) {
      ChunkState& state = args.states[chunk];
      for (size_t i = 0; i < kSampledPages; ++i) {
        const std::byte* block = args.pages[(2 * i + 1) * args.num_pages / (2 * kSampledPages)];
        Begin(args, {args.key_dim, args.value_dim, block, block}, chunk, work);
        Score(work);
        Simd::Store(HighestOfEach(work), work.bases);
        Weights::Make(work);
        alignas(64) float sums[ChunkState::kMaxLanes];
        Simd::Store(Simd::SumOfEach(work.sum), sums);
        for (size_t row = 0; row < work.num_rows; ++row) {
          const float page = work.bases[row] + __builtin_log2f(sums[row]) + num_pages;
          float& expected = state.expected[row];
          expected = i == 0 || page < expected ? page : expected;
        }
      }
    }
  }

  // ---- Keys.
  static void Begin(const HistoryArgs& args, const PageArgs& page, size_t chunk, Work& work) {
    const size_t rows = args.num_rows - chunk * kChunkRows;
    work.page = page;
    work.queries = args.queries + chunk;
    work.state = args.states + chunk;
    work.outputs = args.outputs + chunk * kChunkRows * PaddedValueDim(page.value_dim);
    work.num_rows = rows < kChunkRows ? rows : kChunkRows;
    for (size_t row = 0; row < kChunkRows; ++row) {
      work.highest[row] = Simd::Set(row < work.num_rows ? -__builtin_inff() : 0);
      work.sum[row] = work.offset[row] = Simd::Zero();
    }
    ReadMeta(work);
  }

  static void ReadMeta(Work& work) {
    const size_t offset = size_t{kPageTokens} / 4 * (work.page.key_dim + work.page.value_dim);
    const std::byte* meta = work.page.block + offset;
    for (size_t i = 0; i < size_t{8} * kPageTokens; i += 64) {
      __builtin_prefetch(work.page.ahead + offset + i, 0, 2);
    }
    Simd::SplitMeta(meta, work.key_scale, work.key_min);
    Simd::SplitMeta(meta + size_t{4} * kPageTokens, work.value_digits, work.value_min);
    Float largest_key = Simd::Zero();
    Float largest_value = Simd::Set(1e-30f);
    for (size_t i = 0; i < kPageTokens; i += kLanes) {
      const Float scale = Simd::Load(work.key_scale + i);
      largest_key = Simd::Max(largest_key, scale);
      largest_value = Simd::Max(largest_value, Simd::Load(work.value_digits + i));
      if (i >= kPageTokens / 2) {  // Row half 1.
        Simd::Store(Simd::Mul(scale, Simd::Set(0.25f)), work.key_scale + i);
      }
    }
    work.max_key_scale = Simd::ReduceMax(largest_key);
    work.max_value_scale = Simd::ReduceMax(largest_value);
    const Float factor = Simd::Set(254 / work.max_value_scale);
    for (size_t i = 0; i < kPageTokens; i += kLanes) {
      Simd::Store(Simd::Mul(Simd::Load(work.value_digits + i), factor), work.value_digits + i);
    }
  }

  // Scores from the high digit of q.
  static void Score(Work& work) {
    Products::WithStepsAtOnce(work.page.key_dim, [&](auto steps) {
      switch (work.num_rows) {
        case 1:
          return ScoreRows<1, steps>(work);
        case 2:
          return ScoreRows<2, steps>(work);
        case 3:
          return ScoreRows<3, steps>(work);
        default:
          return ScoreRows<kChunkRows, steps>(work);
      }
    });
  }

  // Not inline: beside other code, GCC 12 runs out of registers here.
  template <size_t kRows, size_t kSteps>
  __attribute__((noinline)) static void ScoreRows(Work& work) {
    const float* query_sums = work.queries->sums[0];
    Products::template MultiplyKeys<kRows, kSteps>(
        work.page, work.queries->digits[0], [&](size_t row, size_t at, Int products) {
          const Float offset = Simd::Mul(Simd::Set(query_sums[row]), Simd::Load(work.key_min + at));
          const Float score =
              Simd::MulAdd(Simd::ToFloat(products), Simd::Load(work.key_scale + at), offset);
          Simd::Store(score, work.scores[row] + at);
          work.highest[row] = Simd::Max(work.highest[row], score);
        });
  }

  // Adds the low digit of q to a row's scores.
  static void RefineRow(size_t row, Work& work) {
    Products::WithStepsAtOnce(work.page.key_dim, [&](auto steps) { RefineRow<steps>(row, work); });
  }

  template <size_t kSteps>
  static void RefineRow(size_t row, Work& work) {
    const Float query_sum = Simd::Set(work.queries->sums[1][row] / 256);
    Float highest = Simd::Set(-__builtin_inff());
    Products::template MultiplyKeys<1, kSteps>(
        work.page, work.queries->digits[1] + row, [&](size_t /*row*/, size_t at, Int products) {
          const Float product = Simd::Mul(Simd::ToFloat(products), Simd::Set(1.0f / 256));
          const Float offset = Simd::MulAdd(query_sum, Simd::Load(work.key_min + at),
                                            Simd::Load(work.scores[row] + at));
          const Float score = Simd::MulAdd(product, Simd::Load(work.key_scale + at), offset);
          Simd::Store(score, work.scores[row] + at);
          highest = Simd::Max(highest, score);
        });
    work.highest[row] = highest;
  }

  // Finds what the page is worth beside those before it, and reads rows again that need it finer.
  static void Place(Work& work) {
    Float highest = HighestOfEach(work);
    MakeRoom(highest, work);
    Float growth = Simd::Exp2(Simd::Sub(highest, Simd::Load(work.state->max)));
    Simd::Store(growth, work.growth);
    FindFineRows(work);
    if (work.any_fine) {
      for (size_t row = 0; row < work.num_rows; ++row) {
        if (work.fine[row]) {
          RefineRow(row, work);
        }
      }
      highest = HighestOfEach(work);
      MakeRoom(highest, work);
      growth = Simd::Exp2(Simd::Sub(highest, Simd::Load(work.state->max)));
      Simd::Store(growth, work.growth);
    }
    Simd::Store(highest, work.bases);
    const Float unit = Simd::Mul(growth, Simd::Set(work.max_value_scale / 254));
    Simd::Store(unit, work.units[0]);
    Simd::Store(Simd::Mul(unit, Simd::Set(1.0f / 256)), work.units[1]);
  }

  // Lane r: row r's highest score.
  static Float HighestOfEach(const Work& work) {
    return Simd::Mul(Simd::MaxOfEach(work.highest), Simd::Load(work.queries->units));
  }

  // Moves each row's maximum up to `highest`, where one of them is too far above it.
  static void MakeRoom(Float highest, Work& work) {
    ChunkState& state = *work.state;
    const Float old_max = Simd::Load(state.max);
    if (Simd::ReduceMax(Simd::Sub(highest, old_max)) <= kHeadroom) {
      return;
    }
    alignas(64) float decays[ChunkState::kMaxLanes];
    const Float max = Simd::Max(old_max, highest);
    const Float decay = Simd::Exp2(Simd::Sub(old_max, max));
    Simd::Store(max, state.max);
    Simd::Store(Simd::Mul(Simd::Load(state.sum), decay), state.sum);
    Simd::Store(Simd::Mul(Simd::Load(state.offset), decay), state.offset);
    Simd::Store(decay, decays);
    const size_t stride = PaddedValueDim(work.page.value_dim);
    for (size_t row = 0; row < work.num_rows; ++row) {
      for (size_t i = row * stride; i < (row + 1) * stride; i += kLanes) {
        Simd::Store(Simd::Mul(Simd::Load(work.outputs + i), Simd::Set(decays[row])),
                    work.outputs + i);
      }
    }
  }

  // Marks the rows that need two digits.
  static void FindFineRows(Work& work) {
    const ChunkState& state = *work.state;
    alignas(64) float sums[ChunkState::kMaxLanes];  // At the beginning 0, without a guess.
    const Float expected = Simd::Exp2(Simd::Sub(Simd::Load(state.expected), Simd::Load(state.max)));
    Simd::Store(Simd::Max(expected, Simd::Load(state.sum)), sums);
    work.any_fine = false;
    for (size_t row = 0; row < work.num_rows; ++row) {
      const float error = work.queries->errors[row] * work.max_key_scale;
      const float growth = work.growth[row];
      const bool coarse =
          growth < kFineShare * sums[row] && growth * error < kFineError * sums[row];
      work.fine[row] = !coarse;  // A NaN is fine.
      work.any_fine |= work.fine[row];
    }
  }

  // ---- Values.
  __attribute__((noinline)) static void Finish(Work& work) {
    Weights::Make(work);
    ChunkState& state = *work.state;
    const Float growth = Simd::Load(work.growth);
    Simd::Store(Simd::MulAdd(Simd::SumOfEach(work.sum), growth, Simd::Load(state.sum)), state.sum);
    Simd::Store(Simd::MulAdd(Simd::SumOfEach(work.offset), growth, Simd::Load(state.offset)),
                state.offset);
    switch (work.num_rows) {
      case 1:
        MultiplyValues<1>(0, 0, work);
        break;
      case 2:
        MultiplyValues<2>(0, 0, work);
        break;
      case 3:
        MultiplyValues<3>(0, 0, work);
        break;
      default:
        MultiplyValues<kChunkRows>(0, 0, work);
        break;
    }
    for (size_t row = 0; work.any_fine && row < work.num_rows; ++row) {
      if (work.fine[row]) {
        MultiplyValues<1>(1, row, work);
      }
    }
  }

  template <size_t kRows>
  static void MultiplyValues(size_t digit, size_t row, Work& work) {
    Products::template MultiplyValues<kRows>(
        work.page, work.digits[digit] + row, work.units[digit] + row,
        work.outputs + row * PaddedValueDim(work.page.value_dim));
  }

  // Of kTranslationBatch pages from `first` on.
  static void TranslateAhead(const HistoryArgs& args, size_t first) {
    const size_t bytes =
        kPageTokens / 4 * (args.key_dim + args.value_dim) + size_t{8} * kPageTokens;
    for (size_t i = first; i < first + kTranslationBatch && i < args.num_pages; ++i) {
      const std::byte* block = args.pages[i];
      const size_t into_page = reinterpret_cast<uintptr_t>(block) % kMemoryPage;
      __builtin_prefetch(block, 0, 2);
      for (size_t at = kMemoryPage - into_page; at < bytes; at += kMemoryPage) {
        __builtin_prefetch(block + at, 0, 2);
      }
    }
    asm volatile("");  // Or GCC 12 finds that this function does nothing, and drops the call.
  }
};

}  // namespace crumb::cpu
