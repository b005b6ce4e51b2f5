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
using testing::HasSubstr;

const SyntheticModel kModel{
    .geometry = {.num_layers = 2, .num_kv_heads = 2, .key_dim = 32, .value_dim = 64},
    .num_query_heads = 6};

StatisticsCollector MakeCollector() {
  auto collector = StatisticsCollector::Create(
      {.model = "synthetic", .geometry = kModel.geometry, .num_query_heads = 6});
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
  constexpr size_t kTokens = 300;
  StatisticsCollector collector = MakeCollector();
  Add(&collector, kTokens, 1);
  const Statistics statistics = Finished(collector);
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
    for (size_t i = 0; i < 32; ++i) {
      EXPECT_NEAR(statistics.key_mean[block * 32 + i], formula.Mean(head, i), 1e-12);
      EXPECT_NEAR(statistics.query_mean[block * 32 + i], formula.QueryMean(head, i), 1e-12);
      for (size_t j = 0; j < 32; ++j) {
        ASSERT_NEAR(statistics.query_moment[(block * 32 + i) * 32 + j], formula.Moment(head, i, j),
                    1e-10);
        ASSERT_NEAR(statistics.key_moment[(block * 32 + i) * 32 + j], formula.KeyMoment(head, i, j),
                    1e-10);
        ASSERT_NEAR(statistics.value_covariance[(block * 64 + i) * 64 + j + 32],
                    formula.Covariance(weights, head, i, j + 32), 1e-10);
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
        &Statistics::key_mean, &Statistics::key_moment}) {
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

TEST(StatisticsCollectorTest, RefusesImpossibleShapes) {
  const auto message = [](StatisticsCollector::Options options) {
    return std::string(StatisticsCollector::Create(std::move(options)).status().message());
  };
  EXPECT_THAT(message({.model = "", .geometry = kModel.geometry, .num_query_heads = 5}),
              HasSubstr("5 query heads"));
  EXPECT_THAT(message({.model = "", .geometry = kModel.geometry, .num_query_heads = 0}),
              HasSubstr("0 query heads"));
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
}

TEST(StatisticsFileTest, EachBadFieldIsNamed) {
  const auto good = FileOf(SmallStatistics());
  const auto replaced = [&](const char* from, const char* to) {
    return ErrorOf(SplitFile::Of(good).Replace(from, to).Join());
  };
  EXPECT_THAT(replaced("crumb.statistics.v2", "crumb.profile.v1"),
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
