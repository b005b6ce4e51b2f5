// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <utility>

#include "crumb/cuda/statistics.h"
#include "tests/cuda/calibrate/collected.h"

namespace crumb {
namespace {

using testing::SizeIs;

// Texts of different lengths.
void AddNumbered(StatisticsCollector* collector, uint32_t number) {
  Add(collector, 300 + 30 * number, number);
}

// Through the file, as a run that was broken off goes on.
TEST(StatisticsCollectorTest, ResumedCollectionIsAsOneThatNeverStopped) {
  for (const uint32_t texts_before : {1u, 3u, 6u}) {
    StatisticsCollector whole = MakeCollector({0, 128}, 7);
    StatisticsCollector first = MakeCollector({0, 128}, 7);
    for (uint32_t text = 0; text < texts_before; ++text) {
      AddNumbered(&whole, text);
      AddNumbered(&first, text);
    }
    const auto file = Statistics::Serialize(Finished(first));
    ASSERT_TRUE(file.ok()) << file.status();
    const auto statistics = Statistics::Parse(*file);
    ASSERT_TRUE(statistics.ok()) << statistics.status();
    auto resumed = StatisticsCollector::Resume(*statistics, 7);
    ASSERT_TRUE(resumed.ok()) << resumed.status();
    for (uint32_t text = texts_before; text < 8; ++text) {
      AddNumbered(&whole, text);
      AddNumbered(&*resumed, text);
    }
    const Statistics expected = Finished(whole);
    const Statistics actual = Finished(*resumed);
    EXPECT_EQ(actual.num_texts, expected.num_texts);
    EXPECT_EQ(actual.num_tokens, expected.num_tokens);
    EXPECT_EQ(actual.attention_windows, expected.attention_windows);
    for (const auto member : kMeans) {
      ASSERT_THAT(actual.*member, SizeIs((expected.*member).size()));
      for (size_t i = 0; i < (expected.*member).size(); ++i) {
        ASSERT_NEAR((actual.*member)[i], (expected.*member)[i],
                    1e-12 * (1 + std::abs((expected.*member)[i])));
      }
    }
    ExpectSameReservoir(actual.reservoir, expected.reservoir);
  }
}

}  // namespace
}  // namespace crumb
