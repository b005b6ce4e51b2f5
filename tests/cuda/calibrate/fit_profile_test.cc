// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/fit_profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <span>

#include "crumb/cuda/demote.h"
#include "crumb/cuda/expand.h"
#include "crumb/cuda/rotate.h"
#include "tests/cuda/calibrate/synthetic.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr size_t kDim = 64;
constexpr size_t kHeads = 2;
constexpr uint32_t kQueryHeads = 6;

const SyntheticModel kModel{
    .geometry = {.num_layers = 2, .num_kv_heads = kHeads, .key_dim = kDim, .value_dim = kDim},
    .num_query_heads = kQueryHeads};

const Statistics& ModelStatistics() {
  static const Statistics statistics = [] {
    auto collector = StatisticsCollector::Create(
        {.model = "synthetic", .geometry = kModel.geometry, .num_query_heads = kQueryHeads});
    for (const uint32_t seed : {1U, 2U}) {
      for (uint32_t layer = 0; layer < 2; ++layer) {
        const SyntheticText text = kModel.Text(layer, 768, seed);
        EXPECT_TRUE(collector->AddText(layer, text.queries, text.keys, text.values).ok());
      }
    }
    return *collector->Finish();
  }();
  return statistics;
}

ProfileParts Fit(const FitOptions& options) {
  auto fitted = FitProfile(ModelStatistics(), options);
  EXPECT_TRUE(fitted.ok()) << fitted.status();
  return fitted.ok() ? std::move(fitted->parts) : ProfileParts();
}

std::shared_ptr<const Profile> ProfileOf(const ProfileParts& parts) {
  const auto file = Profile::Serialize(parts);
  EXPECT_TRUE(file.ok()) << file.status();
  return file.ok() ? *Profile::Parse(*file) : nullptr;
}

std::string ErrorOf(const Statistics& statistics, const FitOptions& options = {}) {
  const auto fitted = FitProfile(statistics, options);
  return fitted.ok() ? "accepted" : std::string(fitted.status().message());
}

TEST(FitProfileTest, TheDefaultIsTiltedWithOneRotationAHead) {
  const ProfileParts parts = Fit({});
  EXPECT_EQ(parts.codec, CodecId::kOscarInt2Tilted);
  EXPECT_THAT(parts.key_rotation, SizeIs(2 * kHeads * kDim * kDim));
  EXPECT_THAT(parts.query_rotation, SizeIs(2 * kHeads * kDim * kDim));
  EXPECT_THAT(parts.value_rotation, SizeIs(2 * kHeads * kDim * kDim));
  EXPECT_THAT(parts.key_feedback, SizeIs(2 * kHeads * kDim * kDim));
  EXPECT_THAT(parts.key_clip, Each(0.0F));
  EXPECT_THAT(parts.value_clip, Each(0.92F));
  ASSERT_THAT(parts.key_mean, SizeIs(2 * kHeads * kDim));
  for (size_t i = 0; i < parts.key_mean.size(); ++i) {
    EXPECT_EQ(parts.key_mean[i], static_cast<float>(ModelStatistics().key_mean[i]));
  }
  EXPECT_NE(ProfileOf(parts), nullptr);
}

TEST(FitProfileTest, ThePublishedRecipeHasNoMeanAndNoFeedback) {
  const ProfileParts parts = Fit({.codec = CodecId::kOscarInt2,
                                  .key_rotation = RotationKind::kPerLayer,
                                  .value_rotation = RotationKind::kPerLayer,
                                  .windows = {.sink_tokens = 0, .recent_tokens = 512}});
  EXPECT_EQ(parts.codec, CodecId::kOscarInt2);
  EXPECT_THAT(parts.key_rotation, SizeIs(2 * kDim * kDim));
  EXPECT_THAT(parts.value_rotation, SizeIs(2 * kDim * kDim));
  EXPECT_THAT(parts.key_feedback, IsEmpty());
  EXPECT_THAT(parts.key_mean, IsEmpty());
  EXPECT_THAT(parts.key_clip, Each(0.96F));
  EXPECT_EQ(parts.windows, (Windows{.sink_tokens = 0, .recent_tokens = 512}));
  EXPECT_NE(ProfileOf(parts), nullptr);
}

TEST(FitProfileTest, LevelsByDeviationHaveNoClipAndNoFeedback) {
  const ProfileParts parts = Fit({.codec = CodecId::kOscarInt2Lm});
  EXPECT_EQ(parts.codec, CodecId::kOscarInt2Lm);
  EXPECT_THAT(parts.key_feedback, IsEmpty());
  EXPECT_THAT(parts.key_mean, SizeIs(2 * kHeads * kDim));
  EXPECT_THAT(parts.key_clip, Each(0.0F));
  EXPECT_THAT(parts.value_clip, Each(0.0F));
  EXPECT_THAT(parts.value_levels, IsEmpty());  // The codec says so.
  EXPECT_TRUE(ProfileOf(parts)->head(1, 0).values_by_deviation);
  EXPECT_THAT(Fit({.codec = CodecId::kOscarInt2Lm, .shift_keys = false}).key_mean, IsEmpty());
}

TEST(FitProfileTest, ValuesAreRoundedByDeviationIfAskedForUnderCodecsWithFeedback) {
  for (const CodecId codec : {CodecId::kOscarInt2Aware, CodecId::kOscarInt2Tilted}) {
    SCOPED_TRACE(CodecName(codec));
    const ProfileParts parts = Fit({.codec = codec, .value_levels = ValueLevels::kDeviation});
    EXPECT_THAT(parts.value_levels, Each(1.0F));
    EXPECT_THAT(parts.value_clip, Each(0.0F));
    EXPECT_TRUE(ProfileOf(parts)->head(1, 0).values_by_deviation);
    EXPECT_THAT(Fit({.codec = codec, .value_levels = ValueLevels::kRange}).value_levels, IsEmpty());
  }
  const ProfileParts published =
      Fit({.codec = CodecId::kOscarInt2, .value_levels = ValueLevels::kDeviation});
  EXPECT_THAT(published.value_levels, IsEmpty());
  EXPECT_THAT(published.value_clip, Each(0.92F));
}

TEST(FitProfileTest, KeysTryTheCodecsRangesUnlessAskedOtherwise) {
  for (const CodecId codec : {CodecId::kOscarInt2Aware, CodecId::kOscarInt2Tilted}) {
    SCOPED_TRACE(CodecName(codec));
    EXPECT_THAT(Fit({.codec = codec}).key_ranges, IsEmpty());
    const ProfileParts narrow = Fit({.codec = codec, .key_ranges = KeyRangeSet::kNarrow});
    EXPECT_THAT(narrow.key_ranges, SizeIs(2 * kHeads * 3));
    EXPECT_EQ(ProfileOf(narrow)->head(1, 1).key_ranges, kNarrowKeyRanges);
  }
  EXPECT_THAT(Fit({.codec = CodecId::kOscarInt2, .key_ranges = KeyRangeSet::kNarrow}).key_ranges,
              IsEmpty());
}

TEST(FitProfileTest, HadamardIsTheSameInEachLayer) {
  const ProfileParts parts = Fit({.codec = CodecId::kOscarInt2Aware,
                                  .key_rotation = RotationKind::kHadamard,
                                  .shift_keys = false});
  ASSERT_THAT(parts.key_rotation, SizeIs(2 * kDim * kDim));
  EXPECT_THAT(parts.key_mean, IsEmpty());
  for (size_t i = 0; i < kDim * kDim; ++i) {
    EXPECT_EQ(std::abs(parts.key_rotation[i]), 0.125F);
    EXPECT_EQ(parts.key_rotation[i], parts.key_rotation[kDim * kDim + i]);
  }
  // The metric is still each head's own.
  EXPECT_THAT(parts.key_feedback, SizeIs(2 * kHeads * kDim * kDim));
  EXPECT_NE(ProfileOf(parts), nullptr);
}

TEST(FitProfileTest, EqualStatisticsMakeEqualFiles) {
  EXPECT_EQ(*Profile::Serialize(Fit({})), *Profile::Serialize(Fit({})));
}

// Per head and per layer, each moment under its rotation has a flat diagonal.
TEST(FitProfileTest, RotationsSpreadWhatTheyWereFittedTo) {
  const auto diagonal = [](std::span<const float> r, const std::vector<double>& c) {
    std::vector<double> shares;
    for (size_t column = 0; column < kDim; ++column) {
      double sum = 0;
      for (size_t i = 0; i < kDim; ++i) {
        for (size_t j = 0; j < kDim; ++j) {
          sum += double{r[i * kDim + column]} * c[i * kDim + j] * double{r[j * kDim + column]};
        }
      }
      shares.push_back(sum);
    }
    return shares;
  };
  const auto spread = [&](std::span<const float> r, const std::vector<double>& c) {
    const auto shares = diagonal(r, c);
    const auto [low, high] = std::minmax_element(shares.begin(), shares.end());
    return *high / *low - 1;
  };
  const std::vector<double>& moments = ModelStatistics().query_moment;
  const size_t size = kDim * kDim;
  const std::vector<double> head3(moments.begin() + 3 * size, moments.end());
  std::vector<double> layer1(size);
  for (size_t i = 0; i < size; ++i) {
    layer1[i] = (moments[2 * size + i] + moments[3 * size + i]) / 2;
  }
  const ProfileParts per_head = Fit({.codec = CodecId::kOscarInt2Aware});
  const ProfileParts per_layer =
      Fit({.codec = CodecId::kOscarInt2Aware, .key_rotation = RotationKind::kPerLayer});
  EXPECT_LT(spread(std::span(per_head.key_rotation).subspan(3 * size, size), head3), 1e-5);
  EXPECT_LT(spread(std::span(per_layer.key_rotation).subspan(size, size), layer1), 1e-5);
  EXPECT_GT(spread(std::span(per_layer.key_rotation).subspan(size, size), head3), 0.1);
}

// (k - mu) A . q B = (k - mu) . q, and a page's keys come back as the model's.
TEST(FitProfileTest, ScaledKeysKeepTheirScoresAndTheirWayBack) {
  const auto profile = ProfileOf(Fit({.codec = CodecId::kOscarInt2Tilted}));
  const HeadParameters& head = profile->head(1, 1);
  ASSERT_NE(head.query_rotation, nullptr);
  std::vector<float> key(kDim);
  std::vector<float> query(kDim);
  double score = 0;
  for (size_t i = 0; i < kDim; ++i) {
    key[i] = head.key_mean[i] + std::sin(static_cast<float>(i));
    query[i] = std::cos(static_cast<float>(3 * i));
    score += double{key[i] - head.key_mean[i]} * query[i];
  }
  std::vector<BFloat16> stored(kDim);
  std::vector<float> read(kDim);
  RotateKeys(head, key, stored);
  RotateQueries(head, query, read);
  double stored_score = 0;
  for (size_t i = 0; i < kDim; ++i) {
    stored_score += double{stored[i].ToFloat()} * double{read[i]};
  }
  EXPECT_NEAR(stored_score, score, 0.03);
  bool is_scaled = false;
  for (size_t i = 0; i < kDim * kDim; ++i) {
    is_scaled |= std::abs(head.query_rotation[i] - head.key_rotation[i]) > 0.05F;
  }
  EXPECT_TRUE(is_scaled);
}

TEST(FitProfileTest, KeysThatAreAllAlikeAreNotScaledAndWarnedOf) {
  Statistics statistics = ModelStatistics();
  for (size_t i = 0; i < kDim * kDim; ++i) {
    statistics.key_moment[i] = statistics.key_mean[i / kDim] * statistics.key_mean[i % kDim];
  }
  const auto fitted = FitProfile(statistics, {.codec = CodecId::kOscarInt2Tilted});
  ASSERT_TRUE(fitted.ok()) << fitted.status();
  ASSERT_THAT(fitted->warnings, SizeIs(1));
  EXPECT_THAT(fitted->warnings[0], HasSubstr("layer 0, KV head 0: all keys were alike"));
  EXPECT_NE(ProfileOf(fitted->parts), nullptr);
}

TEST(FitProfileTest, HeadsCannotShareAScaledRotation) {
  EXPECT_THAT(ErrorOf(ModelStatistics(), {.codec = CodecId::kOscarInt2Tilted,
                                          .key_rotation = RotationKind::kPerLayer}),
              HasSubstr("per-head or hadamard"));
}

TEST(FitProfileTest, OptionsOutOfRangeAreNamed) {
  const Statistics& good = ModelStatistics();
  EXPECT_THAT(ErrorOf(good, {.key_clip = 1.5F}), AllOf(HasSubstr("key_clip is 1.5")));
  EXPECT_THAT(ErrorOf(good, {.value_clip = std::nanf("")}), HasSubstr("value_clip is nan"));
  EXPECT_THAT(ErrorOf(good, {.damping = 0.0}), HasSubstr("damping is 0"));
  EXPECT_THAT(ErrorOf(good, {.damping = 2}), HasSubstr("damping is 2"));
  Statistics odd = good;
  odd.geometry.key_dim = 96;
  EXPECT_THAT(ErrorOf(odd), AllOf(HasSubstr("key_dim is 96"), HasSubstr("power of two")));
}

TEST(FitProfileTest, FewTokensAndSilentHeadsAreWarnedOf) {
  EXPECT_THAT(FitProfile(ModelStatistics(), {})->warnings, IsEmpty());
  Statistics statistics = ModelStatistics();
  statistics.num_tokens = 300;
  std::fill_n(statistics.query_moment.begin(), kDim * kDim, 0.0);
  const auto fitted = FitProfile(statistics, {});
  ASSERT_TRUE(fitted.ok()) << fitted.status();
  ASSERT_THAT(fitted->warnings, SizeIs(2));
  EXPECT_THAT(fitted->warnings[0], HasSubstr("300 tokens"));
  EXPECT_THAT(fitted->warnings[1], HasSubstr("layer 0, KV head 0"));
  EXPECT_NE(ProfileOf(fitted->parts), nullptr);
}

TEST(FitProfileTest, FewerTokensThanChannelsAreDampedAndSayWhatThatMeans) {
  Statistics statistics = ModelStatistics();
  statistics.num_tokens = kDim - 1;
  const auto fitted = FitProfile(statistics, {.choose = false});
  ASSERT_TRUE(fitted.ok()) << fitted.status();
  ASSERT_THAT(fitted->warnings, SizeIs(1));
  EXPECT_THAT(fitted->warnings[0], AllOf(HasSubstr("63 tokens"), HasSubstr("its 64 channels"),
                                         HasSubstr("damping is 0.1"), HasSubstr("more text")));
  const auto damped = FitProfile(ModelStatistics(), {.damping = 0.1, .choose = false});
  ASSERT_TRUE(damped.ok());
  EXPECT_EQ(fitted->parts.key_feedback, damped->parts.key_feedback);
}

TEST(FitProfileTest, MomentsThatNoQueriesHaveAreNamed) {
  Statistics statistics = ModelStatistics();
  double* last = statistics.query_moment.data() + 3 * kDim * kDim;
  last[1] = last[kDim] = 100 * (last[0] + last[kDim + 1]);
  EXPECT_THAT(ErrorOf(statistics),
              AllOf(HasSubstr("layer 1, KV head 1"), HasSubstr("negative eigenvalues")));
}

// ---- what it is for: error of keys, as attention sees it, on text that was not fitted to

double MetricLoss(const Profile& profile) {
  const SyntheticText text = kModel.Text(1, kPageTokens * 4, 9);
  double loss = 0;
  for (uint32_t kv_head = 0; kv_head < kHeads; ++kv_head) {
    const HeadParameters& head = profile.head(1, kv_head);
    const double* moment = ModelStatistics().query_moment.data() + (kHeads + kv_head) * kDim * kDim;
    std::vector<float> rows;
    for (size_t at = kv_head * kDim; at < text.keys.size(); at += kHeads * kDim) {
      rows.insert(rows.end(), text.keys.begin() + static_cast<ptrdiff_t>(at),
                  text.keys.begin() + static_cast<ptrdiff_t>(at + kDim));
    }
    constexpr size_t kPage = kPageTokens * kDim;
    for (size_t at = 0; at < rows.size(); at += kPage) {
      const auto page = std::span(rows).subspan(at, kPage);
      std::vector<BFloat16> rotated(kPage);
      RotateKeys(head, page, rotated);
      std::vector<std::byte> block(Int2HeadBlock{kDim, kDim}.bytes());
      EXPECT_TRUE(DemoteHeadBlock(head, rotated, rotated, block).ok());
      std::vector<BFloat16> keys(kPage);
      std::vector<BFloat16> values(kPage);
      ExpandHeadBlock(head, block, ExpandSpace::kModel, keys, values);
      for (size_t row = 0; row < kPageTokens; ++row) {
        std::vector<double> error(kDim);
        for (size_t k = 0; k < kDim; ++k) {
          error[k] = double{keys[row * kDim + k].ToFloat()} - double{page[row * kDim + k]};
        }
        for (size_t i = 0; i < kDim; ++i) {
          for (size_t j = 0; j < kDim; ++j) {
            loss += error[i] * moment[i * kDim + j] * error[j];
          }
        }
      }
    }
  }
  return loss;
}

double LossOf(const ProfileParts& parts) {
  return MetricLoss(*ProfileOf(parts));
}

// Identity rotations, as if there were no recipe.
ProfileParts Unrotated(float key_clip) {
  ProfileParts parts = Fit({.codec = CodecId::kOscarInt2, .key_clip = key_clip});
  for (size_t i = 0; i < parts.key_rotation.size(); ++i) {
    parts.key_rotation[i] = i / kDim % kDim == i % kDim ? 1.0F : 0.0F;
  }
  return parts;
}

TEST(FitProfileTest, EachPartOfTheRecipeLowersWhatAttentionLoses) {
  const double naive = LossOf(Unrotated(0));
  const double clipped = LossOf(Unrotated(0.96F));
  const double hadamard =
      LossOf(Fit({.codec = CodecId::kOscarInt2, .key_rotation = RotationKind::kHadamard}));
  const double per_layer =
      LossOf(Fit({.codec = CodecId::kOscarInt2, .key_rotation = RotationKind::kPerLayer}));
  const double per_head = LossOf(Fit({.codec = CodecId::kOscarInt2}));
  const double aware = LossOf(Fit({.codec = CodecId::kOscarInt2Aware, .shift_keys = false}));
  const double shifted = LossOf(Fit({.codec = CodecId::kOscarInt2Aware}));
  EXPECT_LT(clipped, 0.9 * naive);
  EXPECT_LT(hadamard, 0.9 * clipped);
  // Rounded to nearest, errors are alike in all directions, and their loss is the trace of the
  // metric, which no rotation changes: here the fitted ones do as well as Hadamard's, not better.
  EXPECT_LT(per_layer, 1.1 * hadamard);
  EXPECT_LT(per_head, 1.1 * hadamard);
  const double lm = LossOf(Fit({.codec = CodecId::kOscarInt2Lm, .shift_keys = false}));
  EXPECT_LT(lm, per_head);
  EXPECT_LT(aware, 0.5 * per_head);
  EXPECT_LT(aware, lm);
  EXPECT_LT(shifted, 0.9 * aware);
  const double scaled = LossOf(Fit({.codec = CodecId::kOscarInt2Tilted}));
  const double scaled_hadamard =
      LossOf(Fit({.codec = CodecId::kOscarInt2Tilted, .key_rotation = RotationKind::kHadamard}));
  EXPECT_LT(scaled, 0.9 * shifted);
  EXPECT_LT(scaled_hadamard, 0.9 * shifted);
}

}  // namespace
}  // namespace crumb
