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
// a page as much as kFineShare of its probability so far (or of what a few pages looked at
// beforehand promise), nor so much that the error of its score could be seen, is read with digit 0
// of q and eight bits of p * scale_v. See
// docs/decisions/0020-digits-by-share.md for what that costs.
//
// Pages are read kBatchPages at a time: all keys, then what the batch is worth, then all values.
// Probabilities of a batch are 2^(score - highest) of its own highest score, so that their digits
// mean the same wherever it stands; what it adds is worth 2^(highest - max) of a maximum that lags:
// it moves only when a batch's highest score is kHeadroom above it, so that outputs are seldom
// rescaled. Where a row needs two digits, each page of the batch is worth something of its own. See
// docs/decisions/0022-four-pages-at-a-time.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/cpu/history_batch.h"
#include "cuda/cpu/history_fetch.h"
#include "cuda/cpu/history_products.h"
#include "cuda/cpu/history_weights.h"
#include "cuda/cpu/split_attention_kernel.h"

namespace crumb::cpu {

inline constexpr float kFineShare = 1.0f / 512;
inline constexpr float kFineError = 1.0f / 8192;  // Of a share times its score's error.
inline constexpr float kHeadroom = 16;            // Of scores, in units of log 2.

inline constexpr size_t kSampledPages = 8;

template <typename Simd>
class HistoryKernel {
 public:
  static void Attend(const HistoryArgs& args) {
    Batch batch = {};
    Fetch::Translations(args, 0);
    if (args.num_pages >= 8 * kSampledPages) {
      ExpectSums(args, batch);
    } else {
      for (size_t i = 0; i < kBatchPages && i < args.num_pages; ++i) {
        Fetch::Block(args, args.pages[i]);
      }
    }
    for (size_t first = 0; first < args.num_pages; first += kBatchPages) {
      for (size_t chunk = 0; chunk * kChunkRows < args.num_rows; ++chunk) {
        Begin(args, chunk, batch);
        TakePages(args, first, batch);
        Score(batch);
        Place(batch);
        if (chunk == 0 && first % kTranslationBatch == 0) {
          Fetch::Translations(args, first + kTranslationBatch);
        }
        Finish(batch);
      }
    }
  }

 private:
  using Float = typename Simd::Float;
  using Int = typename Simd::Int;
  using Fetch = HistoryFetch<Simd>;
  using Products = HistoryProducts<Simd>;
  using Weights = HistoryWeights<Simd>;
  using Batch = HistoryBatch<Simd>;
  using Page = HistoryPage<Simd>;
  static constexpr size_t kLanes = Simd::kLanes;

  // Looks at a few pages of many, so that the first ones are not read as if no others came: as many
  // as there are times the least of those, and half of that, will hardly be more than the sum.
  static void ExpectSums(const HistoryArgs& args, Batch& batch) {
    for (size_t i = 0; i < kSampledPages; ++i) {
      Fetch::Keys(args, SampledPage(args, i));
    }
    const float num_pages = __builtin_log2f(static_cast<float>(args.num_pages) / 2);
    for (size_t chunk = 0; chunk * kChunkRows < args.num_rows; ++chunk) {
      Begin(args, chunk, batch);
      ChunkState& state = *batch.state;
      for (size_t i = 0; i < kSampledPages; ++i) {
        const std::byte* block = SampledPage(args, i);
        if (chunk == 0 && i < kBatchPages) {
          Fetch::Block(args, args.pages[i]);
        }
        batch.num_pages = 1;
        ReadPage(block, batch, batch.pages[0]);
        batch.pages[0].ahead[0] = batch.pages[0].ahead[1] = block;
        Score(batch);
        HistoryGroup& group = batch.groups[0];
        group = {};
        group.num_pages = 1;
        group.max_value_scale = group.max_value_min = 1;
        Simd::Store(HighestOfEach(batch, batch.pages[0]), group.bases);
        typename Weights::Sums sums{};
        Weights::Make(group, batch, sums);
        alignas(64) float p[ChunkState::kMaxLanes];
        Simd::Store(Simd::SumOfEach(sums.p), p);
        for (size_t row = 0; row < batch.num_rows; ++row) {
          const float page = group.bases[row] + __builtin_log2f(p[row]) + num_pages;
          float& expected = state.expected[row];
          expected = i == 0 || page < expected ? page : expected;
        }
      }
    }
  }

  static const std::byte* SampledPage(const HistoryArgs& args, size_t i) {
    return args.pages[(2 * i + 1) * args.num_pages / (2 * kSampledPages)];
  }

  // ---- Keys.
  static void Begin(const HistoryArgs& args, size_t chunk, Batch& batch) {
    const size_t rows = args.num_rows - chunk * kChunkRows;
    batch.key_dim = args.key_dim;
    batch.value_dim = args.value_dim;
    batch.queries = args.queries + chunk;
    batch.state = args.states + chunk;
    batch.outputs = args.outputs + chunk * kChunkRows * PaddedValueDim(args.value_dim);
    batch.num_rows = rows < kChunkRows ? rows : kChunkRows;
  }

  static void TakePages(const HistoryArgs& args, size_t first, Batch& batch) {
    const size_t left = args.num_pages - first;
    batch.num_pages = left < kBatchPages ? left : kBatchPages;
    for (size_t i = 0; i < batch.num_pages; ++i) {
      Page& page = batch.pages[i];
      ReadPage(args.pages[first + i], batch, page);
      for (size_t far = 0; far < 2; ++far) {
        const size_t ahead = first + i + (far + 1) * kBatchPages;
        page.ahead[far] = args.pages[ahead < args.num_pages ? ahead : args.num_pages - 1];
      }
    }
  }

  // A page's metadata.
  static void ReadPage(const std::byte* block, const Batch& batch, Page& page) {
    const std::byte* meta = block + Fetch::MetaOffset(batch.key_dim, batch.value_dim);
    page.block = block;
    Simd::SplitMeta(meta, page.key_scale, page.key_min);
    Simd::SplitMeta(meta + Fetch::kMetaBytes / 2, page.value_scale, page.value_min);
    Float largest[4] = {Simd::Zero(), Simd::Set(1e-30f), Simd::Set(1e-30f), Simd::Zero()};
    for (size_t i = 0; i < kPageTokens; i += kLanes) {
      const Float scale = Simd::Load(page.key_scale + i);
      largest[0] = Simd::Max(largest[0], scale);
      largest[1] = Simd::Max(largest[1], Simd::Load(page.value_scale + i));
      largest[2] = Simd::Max(largest[2], Simd::Abs(Simd::Load(page.value_min + i)));
      if (i >= kPageTokens / 2) {  // Row half 1.
        Simd::Store(Simd::Mul(scale, Simd::Set(0.25f)), page.key_scale + i);
      }
    }
    alignas(64) float of_each[kLanes];
    Simd::Store(Simd::MaxOfEach(largest), of_each);
    page.max_key_scale = of_each[0];
    page.max_value_scale = of_each[1];
    page.max_value_min = of_each[2];
  }

  // Scores from the high digit of q.
  static void Score(Batch& batch) {
    Products::WithStepsAtOnce(batch.key_dim, [&](auto steps) {
      Products::WithCount(kFirstRows[batch.num_rows],
                          [&](auto rows) { ScoreRows<rows, steps>(batch); });
    });
  }

  // Not inline: beside other code, GCC 12 runs out of registers here.
  template <size_t kRows, size_t kSteps>
  __attribute__((noinline)) static void ScoreRows(Batch& batch) {
    const float* query_sums = batch.queries->sums[0];
    for (size_t i = 0; i < batch.num_pages; ++i) {
      Page& page = batch.pages[i];
      Float highest[kChunkRows];
#pragma GCC unroll 4
      for (size_t row = 0; row < kChunkRows; ++row) {
        highest[row] = Simd::Set(row < kRows ? -__builtin_inff() : 0);
      }
      Products::template MultiplyKeys<kRows, kSteps>(
          {batch, page, batch.queries->digits[0], kFirstRows[kRows]},
          [&](size_t row, size_t at, Int products) {
            const Float offset =
                Simd::Mul(Simd::Set(query_sums[row]), Simd::Load(page.key_min + at));
            const Float score =
                Simd::MulAdd(Simd::ToFloat(products), Simd::Load(page.key_scale + at), offset);
            Simd::Store(score, page.scores[row] + at);
            highest[row] = Simd::Max(highest[row], score);
          });
#pragma GCC unroll 4
      for (size_t row = 0; row < kChunkRows; ++row) {
        page.highest[row] = highest[row];
      }
    }
  }

  // Adds the low digit of q to the scores of some rows.
  static void Refine(const HistoryRows& rows, const Batch& batch, Page& page) {
    Products::WithStepsAtOnce(batch.key_dim, [&](auto steps) {
      Products::WithCount(rows, [&](auto count) { RefineRows<count, steps>(rows, batch, page); });
    });
  }

  template <size_t kRows, size_t kSteps>
  __attribute__((noinline)) static void RefineRows(const HistoryRows& rows,
                                                   const Batch& batch,
                                                   Page& page) {
    Float highest[kRows];
#pragma GCC unroll 4
    for (size_t i = 0; i < kRows; ++i) {
      highest[i] = Simd::Set(-__builtin_inff());
    }
    Products::template MultiplyKeys<kRows, kSteps>(
        {batch, page, batch.queries->digits[1], rows}, [&](size_t i, size_t at, Int products) {
          float* scores = page.scores[rows.rows[i]] + at;
          const Float query_sum = Simd::Set(batch.queries->sums[1][rows.rows[i]] / 256);
          const Float product = Simd::Mul(Simd::ToFloat(products), Simd::Set(1.0f / 256));
          const Float offset =
              Simd::MulAdd(query_sum, Simd::Load(page.key_min + at), Simd::Load(scores));
          const Float score = Simd::MulAdd(product, Simd::Load(page.key_scale + at), offset);
          Simd::Store(score, scores);
          highest[i] = Simd::Max(highest[i], score);
        });
#pragma GCC unroll 4
    for (size_t i = 0; i < kRows; ++i) {
      page.highest[rows.rows[i]] = highest[i];
    }
  }

  // ---- What pages are worth.

  // Finds what the batch is worth beside what came before: as a whole, or page by page, and read
  // again, where a row needs it finer.
  static void Place(Batch& batch) {
    HistoryGroup& all = batch.groups[0];
    all.first = 0;
    all.num_pages = batch.num_pages;
    all.max_key_scale = all.max_value_scale = all.max_value_min = 0;
    Float highest = Simd::Set(-__builtin_inff());
    for (size_t i = 0; i < batch.num_pages; ++i) {
      const Page& page = batch.pages[i];
      highest = Simd::Max(highest, HighestOfEach(batch, page));
      all.max_key_scale = Larger(all.max_key_scale, page.max_key_scale);
      all.max_value_scale = Larger(all.max_value_scale, page.max_value_scale);
      all.max_value_min = Larger(all.max_value_min, page.max_value_min);
    }
    MakeRoom(highest, batch);
    batch.num_groups = 1;
    PlaceGroup(highest, batch, all);
    if (all.fine_rows.count > 0) {
      PlaceEachPage(batch);
    }
  }

  static float Larger(float a, float b) {
    return a > b ? a : b;
  }

  static void PlaceEachPage(Batch& batch) {
    batch.num_groups = batch.num_pages;
    for (size_t i = 0; i < batch.num_pages; ++i) {
      Page& page = batch.pages[i];
      HistoryGroup& group = batch.groups[i];
      group.first = i;
      group.num_pages = 1;
      group.max_key_scale = page.max_key_scale;
      group.max_value_scale = page.max_value_scale;
      group.max_value_min = page.max_value_min;
      PlaceGroup(HighestOfEach(batch, page), batch, group);
      if (group.fine_rows.count > 0) {
        Refine(group.fine_rows, batch, page);
        SetWorth(HighestOfEach(batch, page), batch, group);
      }
    }
  }

  static void PlaceGroup(Float highest, const Batch& batch, HistoryGroup& group) {
    SetWorth(highest, batch, group);
    FindFineRows(batch, group);
  }

  // Lane r: row r's highest score.
  static Float HighestOfEach(const Batch& batch, const Page& page) {
    return Simd::Mul(Simd::MaxOfEach(page.highest), Simd::Load(batch.queries->units));
  }

  // Moves each row's maximum up to `highest`, where one of them is too far above it.
  static void MakeRoom(Float highest, const Batch& batch) {
    ChunkState& state = *batch.state;
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
    const size_t stride = PaddedValueDim(batch.value_dim);
    for (size_t row = 0; row < batch.num_rows; ++row) {
      for (size_t i = row * stride; i < (row + 1) * stride; i += kLanes) {
        Simd::Store(Simd::Mul(Simd::Load(batch.outputs + i), Simd::Set(decays[row])),
                    batch.outputs + i);
      }
    }
  }

  static void SetWorth(Float highest, const Batch& batch, HistoryGroup& group) {
    const Float growth = Simd::Exp2(Simd::Sub(highest, Simd::Load(batch.state->max)));
    const Float unit = Simd::Mul(growth, Simd::Set(group.max_value_scale / 254));
    Simd::Store(highest, group.bases);
    Simd::Store(growth, group.growth);
    Simd::Store(unit, group.units[0]);
    Simd::Store(Simd::Mul(unit, Simd::Set(1.0f / 256)), group.units[1]);
  }

  // Marks the rows that need two digits.
  static void FindFineRows(const Batch& batch, HistoryGroup& group) {
    const ChunkState& state = *batch.state;
    alignas(64) float sums[ChunkState::kMaxLanes];  // At the beginning 0, without a guess.
    const Float expected = Simd::Exp2(Simd::Sub(Simd::Load(state.expected), Simd::Load(state.max)));
    Simd::Store(Simd::Max(expected, Simd::Load(state.sum)), sums);
    group.fine_rows.count = 0;
    for (size_t row = 0; row < batch.num_rows; ++row) {
      const float error = batch.queries->errors[row] * group.max_key_scale;
      const float growth = group.growth[row];
      const bool coarse =
          growth < kFineShare * sums[row] && growth * error < kFineError * sums[row];
      group.fine[row] = !coarse;  // A NaN is fine.
      if (group.fine[row]) {
        group.fine_rows.rows[group.fine_rows.count++] = row;
      }
    }
  }

  // ---- Values.
  __attribute__((noinline)) static void Finish(Batch& batch) {
    for (size_t i = 0; i < batch.num_groups; ++i) {
      FinishGroup(batch.groups[i], batch);
    }
  }

  static void FinishGroup(const HistoryGroup& group, Batch& batch) {
    typename Weights::Sums sums{};
    Weights::Make(group, batch, sums);
    ChunkState& state = *batch.state;
    const Float growth = Simd::Load(group.growth);
    Simd::Store(Simd::MulAdd(Simd::SumOfEach(sums.p), growth, Simd::Load(state.sum)), state.sum);
    Simd::Store(Simd::MulAdd(Simd::SumOfEach(sums.offset), growth, Simd::Load(state.offset)),
                state.offset);
    MultiplyValues<true>(batch, group, 0, kFirstRows[batch.num_rows]);
    if (group.fine_rows.count > 0) {
      MultiplyValues<false>(batch, group, 1, group.fine_rows);
    }
  }

  template <bool kAreFirst>
  static void MultiplyValues(const Batch& batch,
                             const HistoryGroup& group,
                             size_t digit,
                             const HistoryRows& rows) {
    Products::WithCount(rows, [&](auto count) {
      Products::template MultiplyValues<count, kAreFirst>(batch, group, digit, rows);
    });
  }
};

}  // namespace crumb::cpu
