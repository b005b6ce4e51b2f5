// SPDX-License-Identifier: Apache-2.0
#include "cuda/calibrate/reservoir_probe.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>
#include <vector>

#include "cuda/calibrate/attention_mass.h"
#include "cuda/calibrate/attention_rows.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"

#include <Eigen/Dense>

namespace crumb::calibrate {
namespace {

using Row = Eigen::VectorXf;

// Of the history's share in softmax's sum: beyond this a score's error is no longer small, and what
// it is worth is all of the output.
constexpr float kLargestGrowth = 20.0F;
constexpr double kLeastSum = 0.05;
// Of an output's squared size: errors below it are alike.
constexpr double kLeastShare = 1e-9;

Eigen::Index Index(size_t value) {
  return static_cast<Eigen::Index>(value);
}

// Rows of [n, dim] by their numbers.
RowsF32 Pick(std::span<const float> rows, const std::vector<size_t>& numbers, size_t dim) {
  RowsF32 picked(Index(numbers.size()), Index(dim));
  for (size_t i = 0; i < numbers.size(); ++i) {
    std::ranges::copy(rows.subspan(numbers[i] * dim, dim), picked.row(Index(i)).data());
  }
  return picked;
}

// Sums over the queries of a half.
struct Sums {
  double output = 0;
  double keys = 0;
  double values = 0;
  double scores = 0;
  double size = 0;        // Of outputs.
  double score_size = 0;  // Of scores about their mean.
  double log_output = 0;  // Of the same by the query, relative to its output.
  double log_keys = 0;
  double log_values = 0;
  double num_logs = 0;
  double bounded = 0;
  double num_queries = 0;

  void Add(const Sums& other) {
    output += other.output;
    keys += other.keys;
    values += other.values;
    scores += other.scores;
    size += other.size;
    score_size += other.score_size;
    log_output += other.log_output;
    log_keys += other.log_keys;
    log_values += other.log_values;
    num_logs += other.num_logs;
    bounded += other.bounded;
    num_queries += other.num_queries;
  }
  AttentionError Typical() const {
    if (num_logs == 0) {
      return {};
    }
    return {.output = kLeastShare * std::exp(log_output / num_logs),
            .keys = kLeastShare * std::exp(log_keys / num_logs),
            .values = kLeastShare * std::exp(log_values / num_logs),
            .scores = Relative().scores};
  }
  AttentionError Relative() const {
    const double by = size > 0 ? 1 / size : 0;
    return {.output = std::max(0.0, output * by),
            .keys = std::max(0.0, keys * by),
            .values = std::max(0.0, values * by),
            .scores = score_size > 0 ? scores / score_size : 0};
  }
};

// What the changes of values have in common: v' - v = offset + gain (v - mean) + what is each own.
struct Common {
  Row mean;
  Row offset;
  float gain = 0;
  double own_size = 0;  // The variance of `offset`, from rows that are each its own.
};

Common CommonOf(const RowsF32& values, const RowsF32& stored) {
  Common common{.mean = values.colwise().mean(), .offset = (stored - values).colwise().mean()};
  const RowsF32 from_mean = values.rowwise() - common.mean.transpose();
  const RowsF32 changes = (stored - values).rowwise() - common.offset.transpose();
  const float size = from_mean.squaredNorm();
  common.gain = size > 0 ? changes.cwiseProduct(from_mean).sum() / size : 0;
  const auto n = static_cast<double>(values.rows());
  common.own_size =
      static_cast<double>((changes - common.gain * from_mean).squaredNorm()) / (n * n);
  return common;
}

// The sampled history of one query: keys [first, last) of its scene, of `total` in all.
struct History {
  Eigen::Index first = 0;
  Eigen::Index count = 0;
  double total = 0;
};

}  // namespace

// The queries of one text, or of a half of it, and the keys that they read.
struct ReservoirProbe::Scene {
  size_t half = 0;
  std::vector<size_t> key_rows;  // In the reservoir.
  std::vector<uint32_t> key_positions;
  std::vector<uint32_t> query_positions;
  RowsF32 keys;
  RowsF32 values;
  RowsF32 queries;
  RowsF32 outputs;
  RowsF32 logits;  // [queries, keys]: the logarithm of each key's probability.

  History HistoryOf(size_t query, uint32_t window, const Windows& windows) const;
  Sums Measure(const RowsF32& stored_keys,
               const RowsF32& stored_values,
               const Common& common,
               uint32_t window,
               const Windows& windows) const;
};

struct ReservoirProbe::State {
  size_t key_dim = 0;
  size_t value_dim = 0;
  size_t num_keys = 0;
  uint32_t window = 0;      // As Statistics::attention_windows.
  std::vector<float> keys;  // Filled up to whole pages with the last row.
  std::vector<float> values;
  std::vector<Scene> scenes;
};

History ReservoirProbe::Scene::HistoryOf(size_t query,
                                         uint32_t window,
                                         const Windows& windows) const {
  const size_t position = query_positions[query];
  const size_t begin = std::max({FirstKeySeen(position, window), size_t{windows.sink_tokens},
                                 size_t{Statistics::kFirstKeyToken}});
  const size_t old =
      position + 1 > windows.recent_tokens ? position + 1 - windows.recent_tokens : 0;
  const size_t end = old / kPageTokens * kPageTokens;
  if (end <= begin) {
    return {};
  }
  const auto first = std::ranges::lower_bound(key_positions, begin);
  const auto last = std::ranges::lower_bound(key_positions, end);
  return {.first = first - key_positions.begin(),
          .count = last - first,
          .total = static_cast<double>(end - begin)};
}

namespace {

// The squared change of one query's output. Rows: keys of the history, of which there are `total`;
// `p` and `p_new` their probabilities before and after, relative to softmax's sum before.
double SquaredChange(const Row& p,
                     const Row& p_new,
                     const RowsF32& values,
                     const RowsF32& new_values,
                     const Row& output,
                     double total) {
  const auto n = static_cast<double>(p.size());
  const RowsF32 changes =
      (new_values.rowwise() - output.transpose()).array().colwise() * p_new.array() -
      (values.rowwise() - output.transpose()).array().colwise() * p.array();
  const double growth = total / n * static_cast<double>((p_new - p).sum());
  const double sum = std::max(kLeastSum, 1 + growth);
  return total / n * static_cast<double>(changes.squaredNorm()) / (sum * sum);
}

// What the common part of the values' changes adds to it.
double CommonChange(const Common& common, const Row& p, const RowsF32& values, double total) {
  const float mass = p.sum();
  if (!(mass > 0)) {
    return 0;
  }
  const Row mean = values.transpose() * p / mass;
  const double change =
      static_cast<double>((common.offset + common.gain * (mean - common.mean)).squaredNorm());
  const double share =
      std::min(1.0, static_cast<double>(mass) * total / static_cast<double>(p.size()));
  return share * share * std::max(0.0, change - common.own_size);
}

}  // namespace

Sums ReservoirProbe::Scene::Measure(const RowsF32& stored_keys,
                                    const RowsF32& stored_values,
                                    const Common& common,
                                    uint32_t window,
                                    const Windows& windows) const {
  const float scale = 1 / std::sqrt(static_cast<float>(keys.cols()));
  const RowsF32 changes = scale * queries * (stored_keys - keys).transpose();
  Sums sums;
  for (size_t query = 0; query < query_positions.size(); ++query) {
    const Eigen::Index at = Index(query);
    const Row output = outputs.row(at);
    sums.size += static_cast<double>(output.squaredNorm());
    sums.num_queries += 1;
    const History history = HistoryOf(query, window, windows);
    if (history.count < 2) {
      continue;
    }
    const Row logit = logits.row(at).segment(history.first, history.count);
    const Row change = changes.row(at).segment(history.first, history.count);
    const Row p = logit.array().min(0.0F).exp();
    const Row p_new = (logit + change).array().min(kLargestGrowth).exp();
    const RowsF32 exact = values.middleRows(history.first, history.count);
    const RowsF32 stored = stored_values.middleRows(history.first, history.count);
    const double together = CommonChange(common, p, exact, history.total);
    const double by_both = SquaredChange(p, p_new, exact, stored, output, history.total) + together;
    const double by_keys = SquaredChange(p, p_new, exact, exact, output, history.total);
    const double by_values = SquaredChange(p, p, exact, stored, output, history.total) + together;
    sums.output += by_both;
    sums.keys += by_keys;
    sums.values += by_values;
    const double least = kLeastShare * static_cast<double>(output.squaredNorm());
    if (least > 0) {
      sums.log_output += std::log(std::max(by_both, least) / least);
      sums.log_keys += std::log(std::max(by_keys, least) / least);
      sums.log_values += std::log(std::max(by_values, least) / least);
      sums.num_logs += 1;
      sums.bounded += std::min(1.0, by_both * kLeastShare / least);
    }
    sums.scores += static_cast<double>((change.array() - change.mean()).square().sum());
    sums.score_size += static_cast<double>((logit.array() - logit.mean()).square().sum());
  }
  return sums;
}

ReservoirProbe::ReservoirProbe(const Statistics& statistics, size_t block) {
  const Reservoir& rows = statistics.reservoir;
  CRUMB_CHECK(!rows.empty() && !rows.query_tokens.empty(), "a probe of no rows");
  auto state = std::make_unique<State>();
  const size_t dk = state->key_dim = statistics.geometry.key_dim;
  const size_t dv = state->value_dim = statistics.geometry.value_dim;
  state->window = statistics.attention_windows[block / statistics.geometry.num_kv_heads];
  const size_t num_keys = state->num_keys = rows.key_tokens.size();
  const size_t num_queries = rows.query_tokens.size();
  const auto of_head = [&](const std::vector<float>& all, size_t size) {
    return std::span(all).subspan(block * size, size);
  };
  const auto keys = of_head(rows.keys, num_keys * dk);
  const auto values = of_head(rows.values, num_keys * dv);
  const auto queries = of_head(rows.queries, num_queries * dk);
  const auto outputs = of_head(rows.outputs, num_queries * dv);
  const auto lse = of_head(rows.lse, num_queries);
  state->keys.assign(keys.begin(), keys.end());
  state->values.assign(values.begin(), values.end());
  for (size_t row = num_keys; row % kPageTokens != 0; ++row) {
    state->keys.insert(state->keys.end(), keys.end() - Index(dk), keys.end());
    state->values.insert(state->values.end(), values.end() - Index(dv), values.end());
  }

  const bool is_one_text = rows.key_tokens.front().text == rows.key_tokens.back().text;
  size_t num_texts = 0;
  for (size_t begin = 0; begin < num_keys; ++num_texts) {
    const uint32_t text = rows.key_tokens[begin].text;
    size_t end = begin;
    while (end < num_keys && rows.key_tokens[end].text == text) {
      ++end;
    }
    for (size_t part = 0; part < (is_one_text ? 2 : 1); ++part) {
      const auto is_of_part = [&](size_t row) { return !is_one_text || row % 2 == part; };
      Scene scene;
      scene.half = is_one_text ? part : num_texts % 2;
      for (size_t row = begin; row < end; ++row) {
        if (is_of_part(row)) {
          scene.key_rows.push_back(row);
          scene.key_positions.push_back(rows.key_tokens[row].position);
        }
      }
      std::vector<size_t> query_rows;
      for (size_t row = 0; row < num_queries; ++row) {
        if (rows.query_tokens[row].text == text && is_of_part(row)) {
          query_rows.push_back(row);
          scene.query_positions.push_back(rows.query_tokens[row].position);
        }
      }
      scene.keys = Pick(keys, scene.key_rows, dk);
      scene.values = Pick(values, scene.key_rows, dv);
      scene.queries = Pick(queries, query_rows, dk);
      scene.outputs = Pick(outputs, query_rows, dv);
      scene.logits = scene.queries * scene.keys.transpose() / std::sqrt(static_cast<float>(dk));
      for (size_t i = 0; i < query_rows.size(); ++i) {
        scene.logits.row(Index(i)).array() -= lse[query_rows[i]];
      }
      state->scenes.push_back(std::move(scene));
    }
    begin = end;
  }
  state_ = std::move(state);
}

ReservoirProbe::~ReservoirProbe() = default;

absl::StatusOr<StoredRows> ReservoirProbe::Store(const HeadParameters& head) const {
  CRUMB_CHECK(head.key_dim == state_->key_dim && head.value_dim == state_->value_dim,
              "a head of other dims");
  return ThroughPages(head, state_->keys, state_->values);
}

HalvesError ReservoirProbe::Measure(const StoredRows& stored, const Windows& windows) const {
  CRUMB_CHECK(stored.keys.size() == state_->keys.size(), "rows of another sample");
  Sums halves[2];
  const auto num_rows = Index(state_->num_keys);
  const auto dim = Index(state_->value_dim);
  const Common common = CommonOf(Eigen::Map<const RowsF32>(state_->values.data(), num_rows, dim),
                                 Eigen::Map<const RowsF32>(stored.values.data(), num_rows, dim));
  for (const Scene& scene : state_->scenes) {
    halves[scene.half].Add(scene.Measure(Pick(stored.keys, scene.key_rows, state_->key_dim),
                                         Pick(stored.values, scene.key_rows, state_->value_dim),
                                         common, state_->window, windows));
  }
  HalvesError error;
  for (size_t half = 0; half < 2; ++half) {
    error.half[half] = halves[half].Relative();
    error.typical_half[half] = halves[half].Typical();
  }
  halves[0].Add(halves[1]);
  error.all = halves[0].Relative();
  error.typical = halves[0].Typical();
  error.bounded_output = halves[0].bounded / std::max(1.0, halves[0].num_queries);
  return error;
}

}  // namespace crumb::calibrate
