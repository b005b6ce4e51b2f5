// SPDX-License-Identifier: Apache-2.0
#include "client/example/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <vector>

namespace crumb::example {
namespace {

TEST(SamplerTest, GreedyTakesTheFirstOfTheMostLikely) {
  auto sampler = Sampler::Create({});
  ASSERT_TRUE(sampler.ok());
  EXPECT_EQ(sampler->Sample(std::vector<float>{1, 3, 2, 3}), 1u);
  EXPECT_EQ(sampler->Sample(std::vector<float>{-5}), 0u);
}

TEST(SamplerTest, EqualSeedsDrawEqualTokens) {
  const std::vector<float> logits(100, 0.0f);
  const auto draw = [&](uint64_t seed) {
    auto sampler = Sampler::Create({.temperature = 1, .seed = seed});
    std::vector<uint32_t> tokens;
    for (int i = 0; i < 20; ++i) {
      tokens.push_back(sampler->Sample(logits));
    }
    return tokens;
  };
  EXPECT_EQ(draw(7), draw(7));
  EXPECT_NE(draw(7), draw(8));
}

TEST(SamplerTest, DrawsByProbability) {
  auto sampler = Sampler::Create({.temperature = 2, .seed = 1});
  // At temperature 2 these are 3 : 1 : 0.
  const std::vector<float> logits = {2 * std::log(3.0f), 0, -1000};
  std::map<uint32_t, int> counts;
  for (int i = 0; i < 4000; ++i) {
    ++counts[sampler->Sample(logits)];
  }
  EXPECT_NEAR(counts[0] / 4000.0, 0.75, 0.03);
  EXPECT_EQ(counts[2], 0);
}

TEST(SamplerTest, TopPLeavesTheUnlikelyOut) {
  auto sampler = Sampler::Create({.temperature = 1, .top_p = 0.6f, .seed = 1});
  const std::vector<float> logits = {std::log(0.2f), std::log(0.5f), std::log(0.3f)};
  std::map<uint32_t, int> counts;
  for (int i = 0; i < 1000; ++i) {
    ++counts[sampler->Sample(logits)];
  }
  EXPECT_EQ(counts[0], 0);
  EXPECT_GT(counts[1], counts[2]);
  EXPECT_GT(counts[2], 0);
}

TEST(SamplerTest, NamesTheOptionThatIsWrong) {
  const auto error = [](const SamplerOptions& options) {
    return std::string(Sampler::Create(options).status().message());
  };
  EXPECT_THAT(error({.temperature = -1}), ::testing::HasSubstr("temperature -1"));
  EXPECT_THAT(error({.temperature = std::numeric_limits<float>::infinity()}),
              ::testing::HasSubstr("temperature inf"));
  EXPECT_THAT(error({.top_p = 0}), ::testing::HasSubstr("top_p 0"));
  EXPECT_THAT(error({.top_p = 1.5f}), ::testing::HasSubstr("top_p 1.5"));
}

}  // namespace
}  // namespace crumb::example
