// SPDX-License-Identifier: Apache-2.0
#include "tests/cuda/calibrate/collected.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace crumb {
namespace {

// Tokens before these are of the sink, or have no history.
constexpr size_t kFirstRow = 64;
constexpr size_t kFirstQuery = 256;

// Scales weights to a mean of one.
std::vector<double> Normalized(std::vector<double> weights) {
  double sum = 0;
  for (const double weight : weights) {
    sum += weight;
  }
  for (double& weight : weights) {
    weight *= static_cast<double>(weights.size()) / sum;
  }
  return weights;
}

}  // namespace

StatisticsCollector MakeCollector(std::vector<uint32_t> windows, uint64_t seed) {
  auto collector = StatisticsCollector::Create({.model = "synthetic",
                                                .geometry = kModel.geometry,
                                                .num_query_heads = 6,
                                                .attention_windows = std::move(windows),
                                                .seed = seed});
  EXPECT_TRUE(collector.ok()) << collector.status();
  return *std::move(collector);
}

void Add(StatisticsCollector* collector, size_t num_tokens, uint32_t seed) {
  for (uint32_t layer = 0; layer < 2; ++layer) {
    const SyntheticText text = kModel.Text(layer, num_tokens, seed);
    const auto status = collector->AddText(layer, text.queries, text.keys, text.values);
    ASSERT_TRUE(status.ok()) << status;
  }
}

Statistics Finished(const StatisticsCollector& collector) {
  auto statistics = collector.Finish();
  EXPECT_TRUE(statistics.ok()) << statistics.status();
  return statistics.ok() ? *std::move(statistics) : Statistics();
}

void ExpectSameReservoir(const Reservoir& actual, const Reservoir& expected) {
  EXPECT_EQ(actual.key_tokens, expected.key_tokens);
  EXPECT_EQ(actual.query_tokens, expected.query_tokens);
  EXPECT_EQ(actual.keys, expected.keys);
  EXPECT_EQ(actual.values, expected.values);
  EXPECT_EQ(actual.queries, expected.queries);
  EXPECT_EQ(actual.outputs, expected.outputs);
  EXPECT_EQ(actual.lse, expected.lse);
}

double StatisticsFormula::Query(size_t token, size_t head, size_t channel) const {
  return text_.queries[(token * 6 + head) * 32 + channel];
}
double StatisticsFormula::Key(size_t token, size_t head, size_t channel) const {
  return text_.keys[(token * 2 + head) * 32 + channel];
}
double StatisticsFormula::Value(size_t token, size_t head, size_t channel) const {
  return text_.values[(token * 2 + head) * 64 + channel];
}

template <typename Term>
double StatisticsFormula::MeanFrom(size_t first, Term term) const {
  double sum = 0;
  for (size_t token = first; token < num_tokens_; ++token) {
    sum += term(token);
  }
  return sum / static_cast<double>(num_tokens_ - first);
}

template <typename Term>
double StatisticsFormula::MeanOverQueries(size_t kv_head, Term term) const {
  double sum = 0;
  for (size_t head = 3 * kv_head; head < 3 * kv_head + 3; ++head) {
    sum += MeanFrom(kFirstQuery, [&](size_t token) { return term(token, head); });
  }
  return sum / 3;
}

double StatisticsFormula::KeyMean(size_t kv_head, size_t channel) const {
  return MeanFrom(kFirstRow, [&](size_t token) { return Key(token, kv_head, channel); });
}

double StatisticsFormula::KeyMoment(size_t kv_head, size_t i, size_t j) const {
  return MeanFrom(kFirstRow,
                  [&](size_t token) { return Key(token, kv_head, i) * Key(token, kv_head, j); });
}

double StatisticsFormula::ValueMean(size_t kv_head, size_t channel) const {
  return MeanFrom(kFirstRow, [&](size_t token) { return Value(token, kv_head, channel); });
}

double StatisticsFormula::ValueMoment(size_t kv_head, size_t i, size_t j) const {
  return MeanFrom(
      kFirstRow, [&](size_t token) { return Value(token, kv_head, i) * Value(token, kv_head, j); });
}

double StatisticsFormula::QueryMean(size_t kv_head, size_t channel) const {
  return MeanOverQueries(kv_head,
                         [&](size_t token, size_t head) { return Query(token, head, channel); });
}

double StatisticsFormula::QueryMoment(size_t kv_head, size_t i, size_t j) const {
  return MeanOverQueries(kv_head, [&](size_t token, size_t head) {
    return Query(token, head, i) * Query(token, head, j);
  });
}

std::vector<double> StatisticsFormula::EnergyWeights(size_t kv_head) const {
  std::vector<double> moment;
  for (size_t i = 0; i < 32; ++i) {
    for (size_t j = 0; j < 32; ++j) {
      moment.push_back(QueryMoment(kv_head, i, j));
    }
  }
  std::vector<double> weights(num_tokens_);
  for (size_t token = 0; token < num_tokens_; ++token) {
    for (size_t i = 0; i < 32; ++i) {
      for (size_t j = 0; j < 32; ++j) {
        weights[token] += Key(token, kv_head, i) * moment[i * 32 + j] * Key(token, kv_head, j);
      }
    }
  }
  return Normalized(std::move(weights));
}

std::vector<double> StatisticsFormula::HistoryWeights(size_t kv_head, size_t window) const {
  std::vector<double> weights(num_tokens_);
  for (size_t query = kFirstQuery; query < num_tokens_; query += 16) {
    const size_t first = query + 1 > window ? query + 1 - window : 0;
    for (size_t head = 3 * kv_head; head < 3 * kv_head + 3; ++head) {
      const double all = PowerSum(query, head, first);
      for (size_t key = std::max(kFirstRow, first); key + 256 <= query; ++key) {
        weights[key] += Power(query, head, key) / all;
      }
    }
  }
  return Normalized(std::move(weights));
}

double StatisticsFormula::Covariance(const std::vector<double>& weights,
                                     size_t kv_head,
                                     size_t i,
                                     size_t j) const {
  return MeanFrom(0, [&](size_t token) {
    return weights[token] * Value(token, kv_head, i) * Value(token, kv_head, j);
  });
}

double StatisticsFormula::Power(size_t query, size_t head, size_t key) const {
  double score = 0;
  for (size_t i = 0; i < 32; ++i) {
    score += Query(query, head, i) * Key(key, head / 3, i);
  }
  return std::exp(score / std::sqrt(32.0));
}

double StatisticsFormula::PowerSum(size_t query, size_t head, size_t first) const {
  double sum = 0;
  for (size_t key = first; key <= query; ++key) {
    sum += Power(query, head, key);
  }
  return sum;
}

}  // namespace crumb
