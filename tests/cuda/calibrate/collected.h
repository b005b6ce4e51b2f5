// SPDX-License-Identifier: Apache-2.0
//
// Statistics of a small synthetic model, and their definitions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "crumb/cuda/statistics.h"
#include "tests/cuda/calibrate/synthetic.h"

namespace crumb {

// Two layers, of three query heads a KV head.
inline const SyntheticModel kModel{
    .geometry = {.num_layers = 2, .num_kv_heads = 2, .key_dim = 32, .value_dim = 64},
    .num_query_heads = 6};

// All that is a mean over tokens.
inline constexpr std::array kMeans = {
    &Statistics::query_moment,     &Statistics::query_mean,
    &Statistics::key_moment,       &Statistics::key_mean,
    &Statistics::value_mean,       &Statistics::value_moment,
    &Statistics::value_covariance, &Statistics::value_attention_covariance};

StatisticsCollector MakeCollector(std::vector<uint32_t> windows = {}, uint64_t seed = 1);
// Adds all layers of a text of kModel.
void Add(StatisticsCollector* collector, size_t num_tokens, uint32_t seed);
Statistics Finished(const StatisticsCollector& collector);
void ExpectSameReservoir(const Reservoir& actual, const Reservoir& expected);

// What the statistics of one text of kModel's layer are, element by element.
class StatisticsFormula {
 public:
  StatisticsFormula(const SyntheticText& text, size_t num_tokens)
      : text_(text), num_tokens_(num_tokens) {}

  double Query(size_t token, size_t head, size_t channel) const;
  double Key(size_t token, size_t head, size_t channel) const;
  double Value(size_t token, size_t head, size_t channel) const;

  // Over the tokens that may become history.
  double KeyMean(size_t kv_head, size_t channel) const;
  double KeyMoment(size_t kv_head, size_t i, size_t j) const;
  double ValueMean(size_t kv_head, size_t channel) const;
  double ValueMoment(size_t kv_head, size_t i, size_t j) const;
  // Over the queries that have a history, of all query heads of a KV head.
  double QueryMean(size_t kv_head, size_t channel) const;
  double QueryMoment(size_t kv_head, size_t i, size_t j) const;

  // Both have a mean of one. By k^T M k, M being the queries' moment.
  std::vector<double> EnergyWeights(size_t kv_head) const;
  // By the attention that each value gets as history; `window` keys are seen.
  std::vector<double> HistoryWeights(size_t kv_head, size_t window) const;
  // Of values, weighted so.
  double Covariance(const std::vector<double>& weights, size_t kv_head, size_t i, size_t j) const;

  // exp(q . k / sqrt(32)) of a query head and its KV head, and its sum over keys `first` to
  // `query`.
  double Power(size_t query, size_t head, size_t key) const;
  double PowerSum(size_t query, size_t head, size_t first) const;

 private:
  // Of `term` over tokens `first` on.
  template <typename Term>
  double MeanFrom(size_t first, Term term) const;
  template <typename Term>
  double MeanOverQueries(size_t kv_head, Term term) const;

  const SyntheticText& text_;
  const size_t num_tokens_;
};

}  // namespace crumb
