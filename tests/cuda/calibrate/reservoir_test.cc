// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "crumb/cuda/statistics.h"
#include "tests/cuda/calibrate/collected.h"
#include "tests/cuda/calibrate/synthetic.h"

namespace crumb {
namespace {

using testing::SizeIs;

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
      const StatisticsFormula formula(texts[text], text == 0 ? size_t{350} : size_t{420});
      ASSERT_GE(position, 64U);
      ASSERT_EQ(rows.keys[(block * 512 + row) * 32 + 3], formula.Key(position, head, 3));
      ASSERT_EQ(rows.values[(block * 512 + row) * 64 + 63], formula.Value(position, head, 63));
    }
    for (size_t row = 0; row < 128; row += 16) {
      const auto [text, position] = rows.query_tokens[row];
      const StatisticsFormula formula(texts[text], text == 0 ? size_t{350} : size_t{420});
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

}  // namespace
}  // namespace crumb
