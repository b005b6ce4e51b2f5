// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

#include "crumb/cuda/statistics.h"
#include "tests/cuda/calibrate/synthetic.h"

namespace crumb {
namespace {

using testing::SizeIs;

const SyntheticModel kModel{
    .geometry = {.num_layers = 2, .num_kv_heads = 2, .key_dim = 32, .value_dim = 64},
    .num_query_heads = 6};

StatisticsCollector MakeCollector() {
  auto collector = StatisticsCollector::Create({.model = "synthetic",
                                                .geometry = kModel.geometry,
                                                .num_query_heads = 6,
                                                .attention_windows = {0, 128},
                                                .seed = 7});
  EXPECT_TRUE(collector.ok()) << collector.status();
  return *std::move(collector);
}

// Adds all layers of a text.
void Add(StatisticsCollector* collector, uint32_t number) {
  for (uint32_t layer = 0; layer < 2; ++layer) {
    const SyntheticText text = kModel.Text(layer, 300 + 30 * number, number);
    const auto status = collector->AddText(layer, text.queries, text.keys, text.values);
    ASSERT_TRUE(status.ok()) << status;
  }
}

Statistics Finished(const StatisticsCollector& collector) {
  auto statistics = collector.Finish();
  EXPECT_TRUE(statistics.ok()) << statistics.status();
  return statistics.ok() ? *std::move(statistics) : Statistics();
}

// Through the file, as a run that was broken off goes on.
TEST(StatisticsCollectorTest, ResumedCollectionIsAsOneThatNeverStopped) {
  for (const uint32_t texts_before : {1u, 3u, 6u}) {
    StatisticsCollector whole = MakeCollector();
    StatisticsCollector first = MakeCollector();
    for (uint32_t text = 0; text < texts_before; ++text) {
      Add(&whole, text);
      Add(&first, text);
    }
    const auto file = Statistics::Serialize(Finished(first));
    ASSERT_TRUE(file.ok()) << file.status();
    const auto statistics = Statistics::Parse(*file);
    ASSERT_TRUE(statistics.ok()) << statistics.status();
    auto resumed = StatisticsCollector::Resume(*statistics, 7);
    ASSERT_TRUE(resumed.ok()) << resumed.status();
    for (uint32_t text = texts_before; text < 8; ++text) {
      Add(&whole, text);
      Add(&*resumed, text);
    }
    const Statistics expected = Finished(whole);
    const Statistics actual = Finished(*resumed);
    EXPECT_EQ(actual.num_texts, expected.num_texts);
    EXPECT_EQ(actual.num_tokens, expected.num_tokens);
    EXPECT_EQ(actual.attention_windows, expected.attention_windows);
    for (const auto member :
         {&Statistics::query_moment, &Statistics::query_mean, &Statistics::value_covariance,
          &Statistics::key_mean, &Statistics::key_moment, &Statistics::value_mean,
          &Statistics::value_moment, &Statistics::value_attention_covariance}) {
      ASSERT_THAT(actual.*member, SizeIs((expected.*member).size()));
      for (size_t i = 0; i < (expected.*member).size(); ++i) {
        ASSERT_NEAR((actual.*member)[i], (expected.*member)[i],
                    1e-12 * (1 + std::abs((expected.*member)[i])));
      }
    }
    EXPECT_EQ(actual.reservoir.key_tokens, expected.reservoir.key_tokens);
    EXPECT_EQ(actual.reservoir.query_tokens, expected.reservoir.query_tokens);
    EXPECT_EQ(actual.reservoir.keys, expected.reservoir.keys);
    EXPECT_EQ(actual.reservoir.values, expected.reservoir.values);
    EXPECT_EQ(actual.reservoir.queries, expected.reservoir.queries);
    EXPECT_EQ(actual.reservoir.outputs, expected.reservoir.outputs);
    EXPECT_EQ(actual.reservoir.lse, expected.reservoir.lse);
  }
}

}  // namespace
}  // namespace crumb
