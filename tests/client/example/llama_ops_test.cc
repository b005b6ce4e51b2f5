// SPDX-License-Identifier: Apache-2.0
#include "client/example/llama_ops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace crumb::example {
namespace {

TEST(LlamaOpsTest, RmsNormScalesEachRowToUnitMeanSquare) {
  const std::vector<float> in = {3, 4, 0, 0, 1, 1, 1, 1};
  const std::vector<float> weight = {1, 1, 1, 2};
  std::vector<float> out(8);
  RmsNorm(in, weight, 0, out);
  EXPECT_FLOAT_EQ(out[0], 3 / 2.5f);
  EXPECT_FLOAT_EQ(out[1], 4 / 2.5f);
  EXPECT_FLOAT_EQ(out[4], 1);
  EXPECT_FLOAT_EQ(out[7], 2);
}

TEST(LlamaOpsTest, RmsNormOfZerosIsZero) {
  std::vector<float> out(2, 9);
  RmsNorm(std::vector<float>{0, 0}, std::vector<float>{1, 1}, 1e-5f, out);
  EXPECT_EQ(out, (std::vector<float>{0, 0}));
}

TEST(LlamaOpsTest, RotaryTurnsNeighboursByPositionTimesFrequency) {
  RotaryEmbedding rotary(4, 100, {});
  rotary.SetPositions(3, 2);
  std::vector<float> rows = {1, 0, 1, 0, 1, 0, 1, 0};
  rotary.Apply(rows.data(), 4);
  for (size_t token = 0; token < 2; ++token) {
    const double position = 3 + static_cast<double>(token);
    EXPECT_FLOAT_EQ(rows[4 * token], static_cast<float>(std::cos(position)));
    EXPECT_FLOAT_EQ(rows[4 * token + 1], static_cast<float>(std::sin(position)));
    EXPECT_FLOAT_EQ(rows[4 * token + 2], static_cast<float>(std::cos(position / 10)));
    EXPECT_FLOAT_EQ(rows[4 * token + 3], static_cast<float>(std::sin(position / 10)));
  }
}

TEST(LlamaOpsTest, RotaryKeepsScoresWhenBothPositionsMove) {
  const std::vector<float> query = {0.3f, -1, 2, 0.5f, 1, 1, -2, 0.1f};
  const std::vector<float> key = {1, 0.2f, -0.7f, 0.4f, 2, -1, 0.5f, 3};
  const auto score = [&](uint32_t query_position, uint32_t key_position) {
    RotaryEmbedding rotary(8, 10000, {});
    auto q = query;
    auto k = key;
    rotary.SetPositions(query_position, 1);
    rotary.Apply(q.data(), 8);
    rotary.SetPositions(key_position, 1);
    rotary.Apply(k.data(), 8);
    double sum = 0;
    for (size_t i = 0; i < q.size(); ++i) {
      sum += double{q[i]} * k[i];
    }
    return sum;
  };
  EXPECT_NEAR(score(7, 2), score(1005, 1000), 1e-4);
  EXPECT_GT(std::abs(score(7, 2) - score(7, 5)), 1e-2);
}

TEST(LlamaOpsTest, RotaryFactorsDivideFrequencies) {
  RotaryEmbedding rotary(2, 100, std::vector<float>{4});
  rotary.SetPositions(1, 1);
  std::vector<float> rows = {1, 0};
  rotary.Apply(rows.data(), 2);
  EXPECT_FLOAT_EQ(rows[0], std::cos(0.25f));
}

TEST(LlamaOpsTest, SwiGluGatesEachRow) {
  const std::vector<float> gate_up = {0, 1, 5, 7, -1, 100, 2, 3};  // Two rows, [gate | up] of two.
  std::vector<float> out(4);
  SwiGlu(gate_up, 2, out);
  EXPECT_FLOAT_EQ(out[0], 0);
  EXPECT_FLOAT_EQ(out[1], 7 / (1 + std::exp(-1.0f)));
  EXPECT_FLOAT_EQ(out[2], -2 / (1 + std::exp(1.0f)));
  EXPECT_FLOAT_EQ(out[3], 300);
}

TEST(LlamaOpsTest, AccumulateAdds) {
  std::vector<float> target = {1, 2};
  Accumulate(std::vector<float>{10, 20}, target);
  EXPECT_EQ(target, (std::vector<float>{11, 22}));
}

}  // namespace
}  // namespace crumb::example
