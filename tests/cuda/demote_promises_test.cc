// SPDX-License-Identifier: Apache-2.0
//
// What demotion promises of the rows that come back.
#include <algorithm>
#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "crumb/cuda/expand.h"
#include "proto/base/float16.h"
#include "tests/cuda/demote_testing.h"

namespace crumb {
namespace {

using testing::HasSubstr;

struct Meta {
  float scale;
  float min;
};

Meta MetaAt(std::span<const std::byte> block, size_t byte) {
  uint16_t words[2];
  std::memcpy(words, block.data() + byte, sizeof(words));
  return {Float16{words[0]}.ToFloat(), Float16{words[1]}.ToFloat()};
}

uint32_t CodeAt(std::span<const std::byte> block, CodePosition position) {
  return (std::to_integer<uint32_t>(block[position.byte]) >> position.shift) & 3u;
}

TEST(DemoteTest, ConstantRowsComeBackExactly) {
  for (const CodecId codec : kCodecs) {
    SCOPED_TRACE(CodecName(codec));
    TestHead head(64, 64, codec);
    std::vector<BFloat16> rows;
    for (uint32_t token = 0; token < kPageTokens; ++token) {
      const auto value = BFloat16::FromFloat((static_cast<float>(token) - 31) * 0.375f);
      rows.insert(rows.end(), 64, value);
    }
    const auto block = MustDemote(head.parameters(), rows, rows, BestCpuPath());
    std::vector<BFloat16> keys(rows.size());
    std::vector<BFloat16> values(rows.size());
    ExpandHeadBlock(head.parameters(), block, ExpandSpace::kRotated, keys, values);
    EXPECT_EQ(keys, rows);
    EXPECT_EQ(values, rows);
  }
}

TEST(DemoteTest, MetadataSaturatesAndIsNeverInfinite) {
  for (const CodecId codec : {CodecId::kOscarInt2, CodecId::kOscarInt2Lm}) {
    SCOPED_TRACE(CodecName(codec));
    TestHead head(128, 128, codec);
    head.parameters().key_clip = 0;
    const auto huge = GaussianRows(size_t{kPageTokens} * 128, 1e37f, 3);
    const auto block = MustDemote(head.parameters(), huge, huge, BestCpuPath());
    const Int2HeadBlock format{128, 128};
    for (uint32_t token = 0; token < kPageTokens; ++token) {
      for (const size_t byte : {format.KeyMetaByte(token), format.ValueMetaByte(token)}) {
        const Meta meta = MetaAt(block, byte);
        EXPECT_GT(meta.scale, 40'000);  // Levels reach 65,504 on both sides, with three steps.
        EXPECT_LE(meta.scale, Float16::kMax);
        EXPECT_LT(meta.min, -60'000);
        EXPECT_GE(meta.min, -Float16::kMax);
      }
    }
  }
}

// What is left of a row along itself: 1 is all of it.
struct Returned {
  double gain = 0;
  double error = 0;  // Squared, of the row's square; about the row's mean, both.
};
Returned MeasureReturned(CodecId codec, float clip, std::span<const BFloat16> rows, uint32_t dim) {
  TestHead head(dim, dim, codec);
  head.parameters().value_clip = clip;
  const auto block = MustDemote(head.parameters(), rows, rows, BestCpuPath());
  std::vector<BFloat16> keys(rows.size());
  std::vector<BFloat16> values(rows.size());
  ExpandHeadBlock(head.parameters(), block, ExpandSpace::kRotated, keys, values);
  double squares = 0;
  double products = 0;
  double errors = 0;
  for (size_t token = 0; token < kPageTokens; ++token) {
    double mean = 0;
    for (size_t i = 0; i < dim; ++i) {
      mean += double{rows[token * dim + i].ToFloat()} / dim;
    }
    for (size_t i = 0; i < dim; ++i) {
      const double x = double{rows[token * dim + i].ToFloat()} - mean;
      const double back = double{values[token * dim + i].ToFloat()} - mean;
      squares += x * x;
      products += x * back;
      errors += (x - back) * (x - back);
    }
  }
  return {products / squares, errors / squares};
}

TEST(DemoteTest, RowsComeBackAsLargeAsTheyWereByTheirDeviation) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    SCOPED_TRACE(dim);
    const auto rows = GaussianRows(size_t{kPageTokens} * dim, 2, dim);
    const Returned lm = MeasureReturned(CodecId::kOscarInt2Lm, 0, rows, dim);
    EXPECT_NEAR(lm.gain, 1, 0.002);
    EXPECT_LT(lm.error, 0.14);  // 13.5 % of a normal row.
    // By a clipped range either smaller than it was, or with more error.
    const Returned clipped = MeasureReturned(CodecId::kOscarInt2, 0.92F, rows, dim);
    EXPECT_LT(clipped.gain, 0.96);
    const Returned wide = MeasureReturned(CodecId::kOscarInt2, 0, rows, dim);
    EXPECT_GT(wide.error, lm.error);
  }
}

TEST(DemoteTest, LevelsByDeviationHaveTheRowsMean) {
  TestHead head(64, 64, CodecId::kOscarInt2Lm);
  head.parameters().value_clip = 0;
  std::vector<BFloat16> rows = GaussianRows(size_t{kPageTokens} * 64, 1, 11);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = BFloat16::FromFloat(rows[i].ToFloat() + static_cast<float>(i / 64) / 8);
  }
  const auto block = MustDemote(head.parameters(), rows, rows, BestCpuPath());
  const Int2HeadBlock format{64, 64};
  for (uint32_t token = 0; token < kPageTokens; ++token) {
    const Meta meta = MetaAt(block, format.ValueMetaByte(token));
    float mean = 0;
    float mean_back = 0;
    for (uint32_t channel = 0; channel < 64; ++channel) {
      mean += rows[token * 64 + channel].ToFloat() / 64;
      const auto code = static_cast<float>(CodeAt(block, format.ValueCode(token, channel)));
      mean_back += (code * meta.scale + meta.min) / 64;
    }
    EXPECT_NEAR(mean_back, mean, 0.005) << token;  // As fp16 has the minimum.
  }
}

TEST(DemoteTest, ClipsValuesAtTheOrderStatistic) {
  // |row| is 1..64 in a shuffled order with signs; floor(0.92 * 64) = 58, so the 59th: 59.
  TestHead head(64, 64, CodecId::kOscarInt2);
  std::vector<BFloat16> rows;
  for (uint32_t token = 0; token < kPageTokens; ++token) {
    for (uint32_t channel = 0; channel < 64; ++channel) {
      const auto magnitude = static_cast<float>((channel * 37 + token) % 64 + 1);
      rows.push_back(BFloat16::FromFloat(channel % 2 == 0 ? magnitude : -magnitude));
    }
  }
  const auto block = MustDemote(head.parameters(), rows, rows, BestCpuPath());
  const Int2HeadBlock format{64, 64};
  for (uint32_t token = 0; token < kPageTokens; ++token) {
    const Meta meta = MetaAt(block, format.ValueMetaByte(token));
    EXPECT_EQ(meta.min, -59);
    EXPECT_EQ(meta.scale, Float16::FromFloat(118.0f / 3).ToFloat());
    for (uint32_t channel = 0; channel < 64; ++channel) {
      const float x = rows[token * 64 + channel].ToFloat();
      const uint32_t code = CodeAt(block, format.ValueCode(token, channel));
      EXPECT_EQ(code, x < -39.3f ? 0u : x < 0 ? 1u : x < 39.3f ? 2u : 3u) << x;
    }
  }
}

// The metric's loss of what was written, against rounding to nearest over the same ranges.
TEST(DemoteTest, FeedbackLowersTheLossInTheMetric) {
  TestHead head(128, 128, CodecId::kOscarInt2Aware);
  const auto rows = GaussianRows(size_t{kPageTokens} * 128, 1, 5);
  const auto loss = [&](const HeadParameters& parameters) {
    const auto block = MustDemote(parameters, rows, rows, BestCpuPath());
    std::vector<BFloat16> keys(rows.size());
    std::vector<BFloat16> values(rows.size());
    ExpandHeadBlock(parameters, block, ExpandSpace::kRotated, keys, values);
    // With C the feedback factor, dk^T (C^T C)^-1 dk = |z|^2 where z C = dk.
    double sum = 0;
    for (size_t token = 0; token < kPageTokens; ++token) {
      std::vector<double> left(128);
      for (size_t i = 0; i < 128; ++i) {
        left[i] = double{rows[token * 128 + i].ToFloat()} - keys[token * 128 + i].ToFloat();
      }
      for (size_t i = 0; i < 128; ++i) {
        const float* weights = head.key_feedback().data() + i * 128;
        const double z = left[i] / weights[i];
        sum += z * z;
        for (size_t j = i + 1; j < 128; ++j) {
          left[j] -= z * weights[j];
        }
      }
    }
    return sum;
  };
  HeadParameters nearest = head.parameters();
  nearest.codec = CodecId::kOscarInt2;
  EXPECT_LT(loss(head.parameters()), 0.7 * loss(nearest));
}

// Queries that attend to a row: its own direction in their covariance, about their mean. A head's
// metric and feedback factor here are of one diagonal, so that both are exact.
TEST(DemoteTest, TheRefitLowersTheLossForTheQueriesThatAttend) {
  constexpr uint32_t kDim = 64;
  TestHead head(kDim, kDim, CodecId::kOscarInt2Tilted, 9);
  std::ranges::fill(head.key_feedback(), 0.0f);
  std::ranges::fill(head.key_metric(), 0.0f);
  std::ranges::fill(head.query_mean(), 0.0f);
  std::vector<double> weights;
  for (size_t i = 0; i < kDim; ++i) {
    const float deviation = i < 8 ? 4.0f : 0.5f;
    head.key_metric()[i * kDim + i] = deviation * deviation;
    head.key_feedback()[i * kDim + i] = 1 / deviation;
    weights.push_back(double{deviation} * deviation);
  }
  const auto rows = GaussianRows(size_t{kPageTokens} * kDim, 2, 6);
  const auto loss = [&](CodecId codec) {
    HeadParameters parameters = head.parameters();
    parameters.codec = codec;
    const auto block = MustDemote(parameters, rows, rows, BestCpuPath());
    const Int2HeadBlock format{kDim, kDim};
    double sum = 0;
    for (uint32_t token = 0; token < kPageTokens; ++token) {
      const Meta meta = MetaAt(block, format.KeyMetaByte(token));
      double in_metric = 0;
      double along_tilt = 0;
      for (uint32_t i = 0; i < kDim; ++i) {
        const double x = rows[token * kDim + i].ToFloat();
        const double code = CodeAt(block, format.KeyCode(token, i));
        const double error = x - code * meta.scale - meta.min;
        in_metric += weights[i] * error * error;
        along_tilt += weights[i] * x / 8 * error;  // 8: the root of the dim.
      }
      sum += in_metric + along_tilt * along_tilt;
    }
    return sum;
  };
  EXPECT_LT(loss(CodecId::kOscarInt2Tilted), 0.6 * loss(CodecId::kOscarInt2Aware));
}

TEST(DemoteTest, RefusesNanAndInfinityAndLeavesTheBlock) {
  for (const CodecId codec : kCodecs) {
    SCOPED_TRACE(CodecName(codec));
    TestHead head(64, 96, codec);
    const auto keys = GaussianRows(size_t{kPageTokens} * 64, 1, 1);
    const auto values = GaussianRows(size_t{kPageTokens} * 96, 1, 2);
    const std::vector<std::byte> untouched(BlockBytes(head.parameters()), std::byte{0x5a});
    auto block = untouched;

    auto with_nan = keys;
    with_nan[63 * 64 + 17] = BFloat16::FromFloat(std::numeric_limits<float>::quiet_NaN());
    const auto nan = DemoteHeadBlock(head.parameters(), with_nan, values, block);
    EXPECT_EQ(nan.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(nan.message()),
                HasSubstr("K holds nan at token 63 of the page, channel 17"));

    auto with_inf = values;
    with_inf[5 * 96 + 95] = BFloat16::FromFloat(-std::numeric_limits<float>::infinity());
    const auto inf = DemoteHeadBlock(head.parameters(), keys, with_inf, block);
    EXPECT_EQ(inf.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(inf.message()),
                HasSubstr("V holds -inf at token 5 of the page, channel 95"));
    EXPECT_EQ(block, untouched);
  }
}

}  // namespace
}  // namespace crumb
