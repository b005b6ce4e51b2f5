// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/statistics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>

#include "proto/base/file.h"
#include "tests/cuda/calibrate/synthetic.h"
#include "tests/cuda/profile/profile_parts.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

const SyntheticModel kModel{
    .geometry = {.num_layers = 2, .num_kv_heads = 2, .key_dim = 32, .value_dim = 64},
    .num_query_heads = 6};

StatisticsCollector MakeCollector(std::vector<uint32_t> windows = {}, uint64_t seed = 1) {
  auto collector = StatisticsCollector::Create({.model = "synthetic",
                                                .geometry = kModel.geometry,
                                                .num_query_heads = 6,
                                                .attention_windows = std::move(windows),
                                                .seed = seed});
  EXPECT_TRUE(collector.ok()) << collector.status();
  return *std::move(collector);
}

// Adds all layers of a text.
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

// The definitions, element by element.
struct Formula {
  const SyntheticText& text;
  size_t num_tokens;

  double Query(size_t token, size_t head, size_t channel) const {
    return text.queries[(token * 6 + head) * 32 + channel];
  }
  double Key(size_t token, size_t head, size_t channel) const {
    return text.keys[(token * 2 + head) * 32 + channel];
  }
  double Value(size_t token, size_t head, size_t channel) const {
    return text.values[(token * 2 + head) * 64 + channel];
  }

  double Moment(size_t kv_head, size_t i, size_t j) const {
    double sum = 0;
    for (size_t head = 3 * kv_head; head < 3 * kv_head + 3; ++head) {
      for (size_t token = 256; token < num_tokens; ++token) {
        sum += Query(token, head, i) * Query(token, head, j);
      }
    }
    return sum / (3 * static_cast<double>(num_tokens - 256));
  }

  std::vector<double> Weights(size_t kv_head) const {
    std::vector<double> moment;
    for (size_t i = 0; i < 32; ++i) {
      for (size_t j = 0; j < 32; ++j) {
        moment.push_back(Moment(kv_head, i, j));
      }
    }
    std::vector<double> weights;
    double sum = 0;
    for (size_t token = 0; token < num_tokens; ++token) {
      double energy = 0;
      for (size_t i = 0; i < 32; ++i) {
        for (size_t j = 0; j < 32; ++j) {
          energy += Key(token, kv_head, i) * moment[i * 32 + j] * Key(token, kv_head, j);
        }
      }
      weights.push_back(energy);
      sum += energy;
    }
    for (double& weight : weights) {
      weight *= static_cast<double>(num_tokens) / sum;
    }
    return weights;
  }

  double Covariance(const std::vector<double>& weights, size_t kv_head, size_t i, size_t j) const {
    double sum = 0;
    for (size_t token = 0; token < num_tokens; ++token) {
      sum += weights[token] * Value(token, kv_head, i) * Value(token, kv_head, j);
    }
    return sum / static_cast<double>(num_tokens);
  }

  double Mean(size_t kv_head, size_t channel) const {
    double sum = 0;
    for (size_t token = 64; token < num_tokens; ++token) {
      sum += Key(token, kv_head, channel);
    }
    return sum / static_cast<double>(num_tokens - 64);
  }

  double KeyMoment(size_t kv_head, size_t i, size_t j) const {
    double sum = 0;
    for (size_t token = 64; token < num_tokens; ++token) {
      sum += Key(token, kv_head, i) * Key(token, kv_head, j);
    }
    return sum / static_cast<double>(num_tokens - 64);
  }

  double ValueMean(size_t kv_head, size_t channel) const {
    double sum = 0;
    for (size_t token = 64; token < num_tokens; ++token) {
      sum += Value(token, kv_head, channel);
    }
    return sum / static_cast<double>(num_tokens - 64);
  }

  double ValueMoment(size_t kv_head, size_t i, size_t j) const {
    double sum = 0;
    for (size_t token = 64; token < num_tokens; ++token) {
      sum += Value(token, kv_head, i) * Value(token, kv_head, j);
    }
    return sum / static_cast<double>(num_tokens - 64);
  }

  // exp(q . k / sqrt(32)) of a query head and its KV head.
  double Power(size_t query, size_t head, size_t key) const {
    double score = 0;
    for (size_t i = 0; i < 32; ++i) {
      score += Query(query, head, i) * Key(key, head / 3, i);
    }
    return std::exp(score / std::sqrt(32.0));
  }
  double PowerSum(size_t query, size_t head, size_t first) const {
    double sum = 0;
    for (size_t key = first; key <= query; ++key) {
      sum += Power(query, head, key);
    }
    return sum;
  }

  // The attention that each value gets as history, of a mean of one; `window` keys are seen.
  std::vector<double> HistoryWeights(size_t kv_head, size_t window) const {
    std::vector<double> weights(num_tokens);
    double sum = 0;
    for (size_t query = 256; query < num_tokens; query += 16) {
      const size_t first = query + 1 > window ? query + 1 - window : 0;
      for (size_t head = 3 * kv_head; head < 3 * kv_head + 3; ++head) {
        const double all = PowerSum(query, head, first);
        for (size_t key = std::max<size_t>(64, first); key + 256 <= query; ++key) {
          const double weight = Power(query, head, key) / all;
          weights[key] += weight;
          sum += weight;
        }
      }
    }
    for (double& weight : weights) {
      weight *= static_cast<double>(num_tokens) / sum;
    }
    return weights;
  }

  double QueryMean(size_t kv_head, size_t channel) const {
    double sum = 0;
    for (size_t head = 3 * kv_head; head < 3 * kv_head + 3; ++head) {
      for (size_t token = 256; token < num_tokens; ++token) {
        sum += Query(token, head, channel);
      }
    }
    return sum / (3 * static_cast<double>(num_tokens - 256));
  }
};

TEST(StatisticsCollectorTest, OneTextGivesTheDefinitions) {
  constexpr size_t kTokens = 400;
  StatisticsCollector collector = MakeCollector({0, 300});
  Add(&collector, kTokens, 1);
  const Statistics statistics = Finished(collector);
  EXPECT_THAT(statistics.attention_windows, ElementsAre(0, 300));
  EXPECT_EQ(statistics.model, "synthetic");
  EXPECT_EQ(statistics.geometry, kModel.geometry);
  EXPECT_EQ(statistics.num_query_heads, 6U);
  EXPECT_EQ(statistics.num_texts, 1U);
  EXPECT_EQ(statistics.num_tokens, kTokens);
  for (size_t block = 0; block < 4; ++block) {
    const SyntheticText text = kModel.Text(static_cast<uint32_t>(block / 2), kTokens, 1);
    const Formula formula{text, kTokens};
    const size_t head = block % 2;
    const std::vector<double> weights = formula.Weights(head);
    const std::vector<double> history = formula.HistoryWeights(head, block < 2 ? kTokens : 300);
    for (size_t i = 0; i < 32; ++i) {
      EXPECT_NEAR(statistics.key_mean[block * 32 + i], formula.Mean(head, i), 1e-12);
      EXPECT_NEAR(statistics.query_mean[block * 32 + i], formula.QueryMean(head, i), 1e-12);
      EXPECT_NEAR(statistics.value_mean[block * 64 + i], formula.ValueMean(head, i), 1e-12);
      for (size_t j = 0; j < 32; ++j) {
        ASSERT_NEAR(statistics.query_moment[(block * 32 + i) * 32 + j], formula.Moment(head, i, j),
                    1e-10);
        ASSERT_NEAR(statistics.key_moment[(block * 32 + i) * 32 + j], formula.KeyMoment(head, i, j),
                    1e-10);
        ASSERT_NEAR(statistics.value_covariance[(block * 64 + i) * 64 + j + 32],
                    formula.Covariance(weights, head, i, j + 32), 1e-10);
        ASSERT_NEAR(statistics.value_moment[(block * 64 + i) * 64 + j + 32],
                    formula.ValueMoment(head, i, j + 32), 1e-10);
        // Softmax is in float.
        ASSERT_NEAR(statistics.value_attention_covariance[(block * 64 + i) * 64 + j + 32],
                    formula.Covariance(history, head, i, j + 32), 1e-4);
      }
    }
  }
}

TEST(StatisticsCollectorTest, TextsCountAlikeWhateverTheirLength) {
  StatisticsCollector both = MakeCollector();
  Add(&both, 300, 1);
  Add(&both, 500, 2);
  StatisticsCollector first = MakeCollector();
  Add(&first, 300, 1);
  StatisticsCollector second = MakeCollector();
  Add(&second, 500, 2);
  const Statistics a = Finished(first);
  const Statistics b = Finished(second);
  const Statistics mean = Finished(both);
  EXPECT_EQ(mean.num_texts, 2U);
  EXPECT_EQ(mean.num_tokens, 800U);
  for (std::vector<double> Statistics::*member :
       {&Statistics::query_moment, &Statistics::query_mean, &Statistics::value_covariance,
        &Statistics::key_mean, &Statistics::key_moment, &Statistics::value_mean,
        &Statistics::value_moment, &Statistics::value_attention_covariance}) {
    for (size_t i = 0; i < (mean.*member).size(); ++i) {
      ASSERT_NEAR((mean.*member)[i], ((a.*member)[i] + (b.*member)[i]) / 2, 1e-12);
    }
  }
}

TEST(StatisticsCollectorTest, RefusesTextsItCannotUseAndAddsNothingOfThem) {
  StatisticsCollector collector = MakeCollector();
  Add(&collector, 300, 1);
  const Statistics before = Finished(collector);
  SyntheticText text = kModel.Text(0, 300, 2);
  const auto message = [&](uint32_t layer, size_t num_tokens) {
    const auto status = collector.AddText(layer, std::span(text.queries).first(num_tokens * 6 * 32),
                                          std::span(text.keys).first(num_tokens * 2 * 32),
                                          std::span(text.values).first(num_tokens * 2 * 64));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(message(0, 256), AllOf(HasSubstr("256 tokens"), HasSubstr("first 256")));
  EXPECT_THAT(message(0, 0), HasSubstr("0 tokens"));
  EXPECT_THAT(message(2, 300), HasSubstr("layer 2 of 2"));

  const float good =
      std::exchange(text.keys[(17 * 2 + 1) * 32 + 5], std::numeric_limits<float>::quiet_NaN());
  EXPECT_THAT(message(1, 300), HasSubstr("keys of layer 1, token 17, head 1, channel 5 is NaN"));
  text.keys[(17 * 2 + 1) * 32 + 5] = good;
  text.queries[(299 * 6 + 4) * 32] = -std::numeric_limits<float>::infinity();
  EXPECT_THAT(message(0, 300),
              HasSubstr("queries of layer 0, token 299, head 4, channel 0 is infinite"));

  const SyntheticText other = kModel.Text(0, 300, 3);
  EXPECT_THAT(std::string(collector
                              .AddText(0, other.queries, other.keys,
                                       std::span(other.values).first(299 * size_t{2} * 64))
                              .message()),
              AllOf(HasSubstr("floats of values"), HasSubstr("[300, 2, 64]")));
  EXPECT_EQ(Finished(collector).query_moment, before.query_moment);
}

TEST(StatisticsCollectorTest, LayersMustHaveSeenTheSameTexts) {
  StatisticsCollector collector = MakeCollector();
  EXPECT_EQ(collector.Finish().status().code(), absl::StatusCode::kFailedPrecondition);
  Add(&collector, 300, 1);
  const SyntheticText text = kModel.Text(0, 300, 2);
  ASSERT_TRUE(collector.AddText(0, text.queries, text.keys, text.values).ok());
  const auto status = collector.Finish().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("layer 1 has seen 1 texts of 300 tokens, layer 0 2 of 600"));
}

TEST(StatisticsCollectorTest, LayersMustHaveSeenTextsOfTheSameLengths) {
  StatisticsCollector collector = MakeCollector();
  for (const auto& [layer, num_tokens] :
       {std::pair(0U, 300U), std::pair(0U, 400U), std::pair(1U, 400U), std::pair(1U, 300U)}) {
    const SyntheticText text = kModel.Text(layer, num_tokens, 1);
    ASSERT_TRUE(collector.AddText(layer, text.queries, text.keys, text.values).ok());
  }
  const auto status = collector.Finish().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("layer 1 has seen texts of other lengths than layer 0"));
}

// ---- the reservoir

TEST(ReservoirTest, RowsAreThoseOfTheTextsAndQueriesKnowTheirAttention) {
  StatisticsCollector collector = MakeCollector({0, 300});
  Add(&collector, 350, 0);
  Add(&collector, 420, 1);
  const Statistics statistics = Finished(collector);
  const Reservoir& rows = statistics.reservoir;
  ASSERT_THAT(rows.key_tokens, SizeIs(512));
  ASSERT_THAT(rows.query_tokens, SizeIs(128));
  EXPECT_TRUE(std::is_sorted(rows.key_tokens.begin(), rows.key_tokens.end()));
  EXPECT_EQ(rows.key_tokens[255].text, 0U);
  EXPECT_EQ(rows.key_tokens[256].text, 1U);
  for (size_t block = 0; block < 4; ++block) {
    const auto layer = static_cast<uint32_t>(block / 2);
    const size_t head = block % 2;
    const SyntheticText texts[] = {kModel.Text(layer, 350, 0), kModel.Text(layer, 420, 1)};
    for (size_t row = 0; row < 512; ++row) {
      const auto [text, position] = rows.key_tokens[row];
      const Formula formula{texts[text], text == 0 ? size_t{350} : size_t{420}};
      ASSERT_GE(position, 64U);
      ASSERT_EQ(rows.keys[(block * 512 + row) * 32 + 3], formula.Key(position, head, 3));
      ASSERT_EQ(rows.values[(block * 512 + row) * 64 + 63], formula.Value(position, head, 63));
    }
    for (size_t row = 0; row < 128; row += 16) {
      const auto [text, position] = rows.query_tokens[row];
      const Formula formula{texts[text], text == 0 ? size_t{350} : size_t{420}};
      ASSERT_GE(position, 256U);
      const size_t query_head = 3 * head + position % 3;
      ASSERT_EQ(rows.queries[(block * 128 + row) * 32 + 5], formula.Query(position, query_head, 5));
      const size_t first = layer == 1 && position + 1 > 300 ? position + 1 - 300 : 0;
      const double sum = formula.PowerSum(position, query_head, first);
      ASSERT_NEAR(rows.lse[block * 128 + row], std::log(sum), 1e-4);
      double output = 0;
      for (size_t key = first; key <= position; ++key) {
        output += formula.Power(position, query_head, key) / sum * formula.Value(key, head, 7);
      }
      ASSERT_NEAR(rows.outputs[(block * 128 + row) * 64 + 7], output, 1e-4);
    }
  }
}

TEST(ReservoirTest, HoldsFourTextsHoweverManyThereAreAndTheSeedSaysWhich) {
  const auto texts_of = [](uint64_t seed) {
    StatisticsCollector collector = MakeCollector({}, seed);
    for (uint32_t text = 0; text < 9; ++text) {
      Add(&collector, 600, text);
    }
    const Reservoir rows = Finished(collector).reservoir;
    EXPECT_THAT(rows.key_tokens, SizeIs(512));
    EXPECT_THAT(rows.query_tokens, SizeIs(128));
    std::vector<uint32_t> texts;
    for (size_t row = 0; row < 512; row += 128) {
      texts.push_back(rows.key_tokens[row].text);
      EXPECT_EQ(rows.key_tokens[row + 127].text, texts.back());
      EXPECT_EQ(rows.query_tokens[row / 4].text, texts.back());
    }
    return texts;
  };
  EXPECT_EQ(texts_of(1), texts_of(1));
  EXPECT_NE(texts_of(1), texts_of(2));
}

// Over many seeds each position of a text is drawn as often as the others.
TEST(ReservoirTest, TokensAreDrawnAlike) {
  const SyntheticModel tiny{
      .geometry = {.num_layers = 1, .num_kv_heads = 1, .key_dim = 32, .value_dim = 32},
      .num_query_heads = 1};
  const SyntheticText text = tiny.Text(0, 1088, 1);
  constexpr int kSeeds = 60;
  std::vector<int> eighths(8);
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    auto collector = StatisticsCollector::Create(
        {.model = "", .geometry = tiny.geometry, .num_query_heads = 1, .seed = seed});
    ASSERT_TRUE(collector.ok());
    ASSERT_TRUE(collector->AddText(0, text.queries, text.keys, text.values).ok());
    for (const auto& token : Finished(*collector).reservoir.key_tokens) {
      ++eighths[(token.position - 64) / 128];
    }
  }
  for (const int count : eighths) {
    // 512 of 1,024, so 64 an eighth and seed; about 4 standard deviations.
    EXPECT_NEAR(count, 64 * kSeeds, 4 * std::sqrt(64 * kSeeds / 2.0));
  }
}

TEST(StatisticsCollectorTest, RefusesImpossibleShapes) {
  const auto message = [](StatisticsCollector::Options options) {
    return std::string(StatisticsCollector::Create(std::move(options)).status().message());
  };
  EXPECT_THAT(message({.model = "", .geometry = kModel.geometry, .num_query_heads = 5}),
              HasSubstr("5 query heads"));
  EXPECT_THAT(message({.model = "", .geometry = kModel.geometry, .num_query_heads = 0}),
              HasSubstr("0 query heads"));
  EXPECT_THAT(message({.model = "",
                       .geometry = kModel.geometry,
                       .num_query_heads = 6,
                       .attention_windows = {1}}),
              HasSubstr("1 attention windows for 2 layers"));
  EXPECT_THAT(
      message({.model = "",
               .geometry = {.num_layers = 1, .num_kv_heads = 1, .key_dim = 33, .value_dim = 32},
               .num_query_heads = 1}),
      HasSubstr("key_dim 33"));
}

// ---- the file

Statistics SmallStatistics() {
  StatisticsCollector collector = MakeCollector();
  Add(&collector, 300, 1);
  return Finished(collector);
}

std::vector<std::byte> FileOf(const Statistics& statistics) {
  auto file = Statistics::Serialize(statistics);
  EXPECT_TRUE(file.ok()) << file.status();
  return file.ok() ? *std::move(file) : std::vector<std::byte>();
}

std::string ErrorOf(const std::vector<std::byte>& file) {
  const auto statistics = Statistics::Parse(file);
  return statistics.ok() ? "accepted" : std::string(statistics.status().message());
}

TEST(StatisticsFileTest, WhatWasWrittenIsRead) {
  const Statistics statistics = SmallStatistics();
  const auto file = FileOf(statistics);
  EXPECT_EQ(file, FileOf(statistics));
  const auto read = Statistics::Parse(file);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->model, statistics.model);
  EXPECT_EQ(read->geometry, statistics.geometry);
  EXPECT_EQ(read->num_query_heads, statistics.num_query_heads);
  EXPECT_EQ(read->num_texts, statistics.num_texts);
  EXPECT_EQ(read->num_tokens, statistics.num_tokens);
  EXPECT_EQ(read->query_moment, statistics.query_moment);
  EXPECT_EQ(read->value_covariance, statistics.value_covariance);
  EXPECT_EQ(read->key_mean, statistics.key_mean);
  EXPECT_EQ(read->key_moment, statistics.key_moment);
  EXPECT_EQ(read->query_mean, statistics.query_mean);
  EXPECT_EQ(read->value_mean, statistics.value_mean);
  EXPECT_EQ(read->value_moment, statistics.value_moment);
  EXPECT_EQ(read->value_attention_covariance, statistics.value_attention_covariance);
  EXPECT_EQ(read->attention_windows, statistics.attention_windows);
  EXPECT_EQ(read->reservoir.key_tokens, statistics.reservoir.key_tokens);
  EXPECT_EQ(read->reservoir.query_tokens, statistics.reservoir.query_tokens);
  EXPECT_EQ(read->reservoir.keys, statistics.reservoir.keys);
  EXPECT_EQ(read->reservoir.values, statistics.reservoir.values);
  EXPECT_EQ(read->reservoir.queries, statistics.reservoir.queries);
  EXPECT_EQ(read->reservoir.outputs, statistics.reservoir.outputs);
  EXPECT_EQ(read->reservoir.lse, statistics.reservoir.lse);
}

TEST(StatisticsFileTest, AReservoirMayBeEmpty) {
  Statistics statistics = SmallStatistics();
  statistics.reservoir = {};
  const auto read = Statistics::Parse(FileOf(statistics));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_TRUE(read->reservoir.empty());
}

TEST(StatisticsFileTest, EachBadFieldIsNamed) {
  const auto good = FileOf(SmallStatistics());
  const auto replaced = [&](const char* from, const char* to) {
    return ErrorOf(SplitFile::Of(good).Replace(from, to).Join());
  };
  EXPECT_THAT(replaced("crumb.statistics.v3", "crumb.profile.v1"),
              AllOf(HasSubstr("'format'"), HasSubstr("crumb.profile.v1")));
  EXPECT_THAT(replaced("\"num_texts\":\"1\"", "\"num_texts\":\"0\""),
              HasSubstr("'num_texts' is 0"));
  EXPECT_THAT(replaced("\"num_tokens\":\"300\"", "\"num_tokens\":\"0\""),
              HasSubstr("'num_tokens' is 0"));
  EXPECT_THAT(replaced("\"num_query_heads\":\"6\"", "\"num_query_heads\":\"7\""),
              AllOf(HasSubstr("'num_query_heads' is 7"), HasSubstr("2 KV heads")));
  EXPECT_THAT(replaced("\"num_layers\":\"2\"", "\"num_layers\":\"3\""),
              AllOf(HasSubstr("'query_moment'"), HasSubstr("[3, 2, 32, 32]")));
  EXPECT_THAT(replaced("\"key_mean\"", "\"key_mode\""), HasSubstr("'key_mean' is missing"));
  EXPECT_THAT(replaced("\"key_moment\"", "\"key_memont\""), HasSubstr("'key_moment' is missing"));
  EXPECT_THAT(replaced("\"query_mean\"", "\"query_mode\""), HasSubstr("'query_mean' is missing"));
}

TEST(StatisticsFileTest, EachBadValueIsNamed) {
  const Statistics good = SmallStatistics();
  const auto spoilt = [&](auto what) {
    Statistics bad = good;
    what(&bad);
    const auto file = Statistics::Serialize(bad);
    return file.ok() ? "accepted" : std::string(file.status().message());
  };
  EXPECT_THAT(
      spoilt([](Statistics* s) { s->query_moment[3] = std::numeric_limits<double>::quiet_NaN(); }),
      AllOf(HasSubstr("'query_moment'"), HasSubstr("element 3 is NaN")));
  EXPECT_THAT(spoilt([](Statistics* s) { s->query_moment[32 * 32 + 33] = -1; }),
              AllOf(HasSubstr("'query_moment', layer 0, KV head 1 [32, 32]"),
                    HasSubstr("element 1 of the diagonal is -1")));
  EXPECT_THAT(spoilt([](Statistics* s) { s->value_covariance[2 * 64 * 64 + 1] += 1; }),
              AllOf(HasSubstr("'value_covariance', layer 1, KV head 0"), HasSubstr("not symmetric"),
                    HasSubstr("(1, 0)")));
  EXPECT_THAT(spoilt([](Statistics* s) { s->key_mean.pop_back(); }),
              AllOf(HasSubstr("key_mean has 127 values"), HasSubstr("128")));
  EXPECT_THAT(spoilt([](Statistics* s) { s->geometry.num_layers = 0; }), HasSubstr("geometry"));
  EXPECT_THAT(spoilt([](Statistics* s) { s->key_mean[32] += 100; }),
              AllOf(HasSubstr("'key_moment', layer 0, KV head 1 [32, 32], less that of its mean"),
                    HasSubstr("eigenvalue below")));
  EXPECT_THAT(spoilt([](Statistics* s) {
                const double most = 2 * std::sqrt(s->query_moment[0] * s->query_moment[33]);
                s->query_moment[1] = s->query_moment[32] = most;
              }),
              AllOf(HasSubstr("'query_moment', layer 0, KV head 0"), HasSubstr("eigenvalue")));
}

TEST(StatisticsFileTest, EachBadPartOfTheReservoirIsNamed) {
  const Statistics good = SmallStatistics();
  const auto spoilt = [&](auto what) {
    Statistics bad = good;
    what(&bad.reservoir);
    const auto file = Statistics::Serialize(bad);
    return file.ok() ? "accepted" : std::string(file.status().message());
  };
  EXPECT_THAT(spoilt([](Reservoir* r) { r->values[9] = std::numeric_limits<float>::infinity(); }),
              AllOf(HasSubstr("'reservoir.values'"), HasSubstr("element 9 is")));
  EXPECT_THAT(spoilt([](Reservoir* r) { r->lse.pop_back(); }),
              AllOf(HasSubstr("reservoir.lse has"), HasSubstr("geometry asks for")));
  EXPECT_THAT(spoilt([](Reservoir* r) { r->key_tokens[1] = r->key_tokens[0]; }),
              AllOf(HasSubstr("'reservoir.key_tokens': row 1"), HasSubstr("ascend")));
  EXPECT_THAT(spoilt([](Reservoir* r) { r->query_tokens.back().text = 7; }),
              AllOf(HasSubstr("text 7"), HasSubstr("no keys")));
  EXPECT_THAT(spoilt([](Reservoir* r) { r->query_tokens.clear(); }),
              HasSubstr("reservoir.queries has"));
  EXPECT_THAT(spoilt([](Reservoir* r) {
                while (r->key_tokens.size() <= 512) {
                  r->key_tokens.push_back(r->key_tokens.back());
                  ++r->key_tokens.back().position;
                }
                r->keys.resize(size_t{4} * 513 * 32);
                r->values.resize(size_t{4} * 513 * 64);
              }),
              AllOf(HasSubstr("[513, 2]"), HasSubstr("1 to 512 rows")));
  const auto file = FileOf(good);
  EXPECT_THAT(ErrorOf(SplitFile::Of(file).Replace("reservoir.lse", "reservoir.els").Join()),
              HasSubstr("'reservoir.lse' is missing"));
  EXPECT_THAT(ErrorOf(SplitFile::Of(file).Replace("attention_windows", "attention_wlndows").Join()),
              HasSubstr("'attention_windows' is missing"));
}

TEST(StatisticsFileTest, TruncationsAndAbsenceAreRefused) {
  const auto file = FileOf(SmallStatistics());
  for (size_t size = 0; size < file.size(); size += size < 800 ? 1 : 4093) {
    EXPECT_NE(ErrorOf({file.begin(), file.begin() + static_cast<ptrdiff_t>(size)}), "accepted");
  }
  const std::filesystem::path path = std::filesystem::path(testing::TempDir()) / "none.statistics";
  EXPECT_EQ(Statistics::Load(path).status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(WriteFileAtomically(path, file).ok());
  EXPECT_TRUE(Statistics::Load(path).ok());
  std::filesystem::resize_file(path, file.size() - 1);
  EXPECT_THAT(std::string(Statistics::Load(path).status().message()),
              AllOf(HasSubstr("none.statistics"), HasSubstr("truncated")));
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace crumb
