// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/statistics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/cuda/calibrate/collected.h"
#include "tests/cuda/calibrate/synthetic.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

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
    const StatisticsFormula formula(text, kTokens);
    const size_t head = block % 2;
    const std::vector<double> weights = formula.EnergyWeights(head);
    const std::vector<double> history = formula.HistoryWeights(head, block < 2 ? kTokens : 300);
    for (size_t i = 0; i < 32; ++i) {
      EXPECT_NEAR(statistics.key_mean[block * 32 + i], formula.KeyMean(head, i), 1e-12);
      EXPECT_NEAR(statistics.query_mean[block * 32 + i], formula.QueryMean(head, i), 1e-12);
      EXPECT_NEAR(statistics.value_mean[block * 64 + i], formula.ValueMean(head, i), 1e-12);
      for (size_t j = 0; j < 32; ++j) {
        ASSERT_NEAR(statistics.query_moment[(block * 32 + i) * 32 + j],
                    formula.QueryMoment(head, i, j), 1e-10);
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
  for (const auto member : kMeans) {
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

}  // namespace
}  // namespace crumb
