// SPDX-License-Identifier: Apache-2.0
#include "cuda/calibrate/import_profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <span>
#include <string>

#include "cuda/calibrate/rotation.h"
#include "tests/cuda/calibrate/synthetic.h"

namespace crumb::calibrate {
namespace {

using checkpoint::RotationCheckpoint;
using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr Geometry kGeometry = {.num_layers = 2, .num_kv_heads = 2, .key_dim = 32, .value_dim = 64};

// Hadamard matrices with a row negated, so that no two are alike.
RotationCheckpoint Checkpoint(const char* objective, uint32_t dim, uint32_t num_heads) {
  RotationCheckpoint checkpoint{.objective = objective,
                                .is_per_head = num_heads > 1,
                                .num_heads = num_heads,
                                .dim = dim,
                                .layer_ids = {0, 1},
                                .rotations = {}};
  for (size_t block = 0; block < size_t{2} * num_heads; ++block) {
    FloatMatrix rotation = ToFloat(Hadamard(dim));
    for (float& x : std::span(rotation).subspan(block * dim, dim)) {
      x = -x;
    }
    checkpoint.rotations.insert(checkpoint.rotations.end(), rotation.begin(), rotation.end());
  }
  return checkpoint;
}

RotationCheckpoint Keys(uint32_t num_heads = 1) {
  return Checkpoint("qqt_r_h_pbr", kGeometry.key_dim, num_heads);
}
RotationCheckpoint Values(uint32_t num_heads = 1) {
  return Checkpoint("sst_r_h_pbr", kGeometry.value_dim, num_heads);
}

Statistics MakeStatistics() {
  const SyntheticModel model{.geometry = kGeometry, .num_query_heads = 4};
  auto collector = StatisticsCollector::Create(
      {.model = "synthetic", .geometry = kGeometry, .num_query_heads = 4});
  for (uint32_t layer = 0; layer < kGeometry.num_layers; ++layer) {
    const SyntheticText text = model.Text(layer, 600, 1);
    EXPECT_TRUE(collector->AddText(layer, text.queries, text.keys, text.values).ok());
  }
  return *collector->Finish();
}

std::string ErrorOf(const absl::StatusOr<ImportedProfile>& imported) {
  return imported.ok() ? "accepted" : std::string(imported.status().message());
}

TEST(ImportProfileTest, RotationsAloneMakeThePublishedRecipe) {
  const auto imported = ImportProfile(Keys(), Values(), std::nullopt,
                                      {.model = "m", .num_kv_heads = 2, .key_clip = 0.9F});
  ASSERT_TRUE(imported.ok()) << imported.status();
  const ProfileParts& parts = imported->parts;
  EXPECT_EQ(parts.codec, CodecId::kOscarInt2);
  EXPECT_EQ(parts.geometry, kGeometry);
  EXPECT_EQ(parts.key_rotation, Keys().rotations);
  EXPECT_EQ(parts.value_rotation, Values().rotations);
  EXPECT_THAT(parts.key_clip, Each(0.9F));
  EXPECT_THAT(parts.value_clip, Each(0.92F));
  EXPECT_THAT(parts.key_mean, IsEmpty());
  EXPECT_THAT(parts.key_feedback, IsEmpty());
  EXPECT_THAT(imported->warnings, IsEmpty());
  EXPECT_TRUE(Profile::Serialize(parts).ok());
}

TEST(ImportProfileTest, StatisticsAddMeanKeysAndFeedbackForTheImportedRotations) {
  const Statistics statistics = MakeStatistics();
  for (const uint32_t num_heads : {1U, 2U}) {
    const auto imported = ImportProfile(Keys(num_heads), Values(num_heads), statistics, {});
    ASSERT_TRUE(imported.ok()) << imported.status();
    const ProfileParts& parts = imported->parts;
    EXPECT_EQ(parts.codec, CodecId::kOscarInt2Aware);
    EXPECT_EQ(parts.model, "synthetic");
    EXPECT_EQ(parts.key_mean, ToFloat(statistics.key_mean));
    EXPECT_THAT(parts.key_clip, Each(0.0F));
    // Layer 1, KV head 1, by the rotation that this head uses.
    constexpr size_t kMatrix = size_t{kGeometry.key_dim} * kGeometry.key_dim;
    const auto rotation =
        std::span(parts.key_rotation).subspan((num_heads == 1 ? 1 : 3) * kMatrix, kMatrix);
    const auto factor =
        FeedbackFactor(std::span(statistics.query_moment).subspan(3 * kMatrix, kMatrix), rotation,
                       kGeometry.key_dim, 0.01);
    ASSERT_TRUE(factor.ok());
    EXPECT_THAT(std::vector(parts.key_feedback.begin() + 3 * kMatrix, parts.key_feedback.end()),
                testing::ElementsAreArray(ToFloat(*factor)));
    EXPECT_TRUE(Profile::Serialize(parts).ok());
  }
}

TEST(ImportProfileTest, LevelsByDeviationNeedNoStatisticsAndTakeMeanKeysFromThem) {
  const ImportOptions options{.num_kv_heads = 2, .codec = CodecId::kOscarInt2Lm};
  const auto alone = ImportProfile(Keys(), Values(), std::nullopt, options);
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_EQ(alone->parts.codec, CodecId::kOscarInt2Lm);
  EXPECT_THAT(alone->parts.key_clip, Each(0.0F));
  EXPECT_THAT(alone->parts.value_clip, Each(0.0F));
  EXPECT_THAT(alone->parts.key_mean, IsEmpty());
  EXPECT_TRUE(Profile::Serialize(alone->parts).ok());
  const Statistics statistics = MakeStatistics();
  const auto shifted = ImportProfile(Keys(), Values(), statistics, options);
  ASSERT_TRUE(shifted.ok()) << shifted.status();
  EXPECT_EQ(shifted->parts.key_mean, ToFloat(statistics.key_mean));
  EXPECT_THAT(shifted->parts.key_feedback, IsEmpty());
  EXPECT_TRUE(Profile::Serialize(shifted->parts).ok());
}

TEST(ImportProfileTest, ValuesMayBeRoundedByDeviationBesideFeedback) {
  const auto imported =
      ImportProfile(Keys(), Values(), MakeStatistics(), {.value_levels = ValueLevels::kDeviation});
  ASSERT_TRUE(imported.ok()) << imported.status();
  EXPECT_EQ(imported->parts.codec, CodecId::kOscarInt2Aware);
  EXPECT_THAT(imported->parts.value_levels, Each(1.0F));
  EXPECT_THAT(imported->parts.value_clip, Each(0.0F));
  EXPECT_TRUE(Profile::Serialize(imported->parts).ok());
}

TEST(ImportProfileTest, CodecsThatTheInputCannotMakeAreRefused) {
  EXPECT_THAT(ErrorOf(ImportProfile(Keys(), Values(), std::nullopt,
                                    {.num_kv_heads = 2, .codec = CodecId::kOscarInt2Aware})),
              AllOf(HasSubstr("oscar-int2-aware"), HasSubstr("--stats")));
  EXPECT_THAT(ErrorOf(ImportProfile(Keys(), Values(), MakeStatistics(),
                                    {.codec = CodecId::kOscarInt2Tilted})),
              AllOf(HasSubstr("oscar-int2-tilted"), HasSubstr("scales keys")));
}

TEST(ImportProfileTest, VersionsMayDifferBetweenKeysAndValues) {
  const auto imported = ImportProfile(Keys(2), Values(1), std::nullopt, {});
  ASSERT_TRUE(imported.ok()) << imported.status();
  EXPECT_EQ(imported->parts.geometry, kGeometry);
  EXPECT_TRUE(Profile::Serialize(imported->parts).ok());
}

TEST(ImportProfileTest, SaysHowLayersOfAModelWithOtherLayersAreCounted) {
  RotationCheckpoint keys = Keys(2);
  RotationCheckpoint values = Values(2);
  keys.layer_ids = values.layer_ids = {3, 7};
  const auto imported = ImportProfile(keys, values, std::nullopt, {});
  ASSERT_TRUE(imported.ok()) << imported.status();
  EXPECT_THAT(imported->warnings,
              ElementsAre(AllOf(HasSubstr("2 (3, 7)"), HasSubstr("layers 0 to 1"))));
}

TEST(ImportProfileTest, HeadsMustBeKnownAndAgreed) {
  EXPECT_THAT(ErrorOf(ImportProfile(Keys(), Values(), std::nullopt, {})),
              HasSubstr("give --kv-heads"));
  EXPECT_THAT(ErrorOf(ImportProfile(Keys(2), Values(), std::nullopt, {.num_kv_heads = 3})),
              HasSubstr("3 by --kv-heads and 2 by --k's file"));
  EXPECT_THAT(ErrorOf(ImportProfile(Keys(2), Values(4), std::nullopt, {})),
              HasSubstr("2 by --k's file and 4 by --v's file"));
  EXPECT_THAT(ErrorOf(ImportProfile(Keys(4), Values(), MakeStatistics(), {})),
              HasSubstr("2 by --stats and 4 by --k's file"));
  EXPECT_THAT(ErrorOf(ImportProfile(Keys(), Values(), std::nullopt, {.num_kv_heads = 65})),
              HasSubstr("--kv-heads is 65; at most 64"));
}

TEST(ImportProfileTest, FilesAndStatisticsMustBeOfOneModel) {
  RotationCheckpoint other = Values();
  other.layer_ids = {0, 2};
  EXPECT_THAT(ErrorOf(ImportProfile(Keys(), other, std::nullopt, {.num_kv_heads = 2})),
              HasSubstr("--k's file has layers 2 (0, 1), --v's 2 (0, 2)"));
  EXPECT_THAT(ErrorOf(ImportProfile(Values(), Keys(), std::nullopt, {.num_kv_heads = 2})),
              AllOf(HasSubstr("'sst_r_h_pbr'"), HasSubstr("swapped")));
  const auto wide = Checkpoint("qqt_r_h_pbr", 128, 1);
  EXPECT_THAT(ErrorOf(ImportProfile(wide, Values(), MakeStatistics(), {})),
              AllOf(HasSubstr("key_dim 128"), HasSubstr("statistics of 2, 32, 64")));
}

TEST(ImportProfileTest, RotationsMustBeOrthogonal) {
  RotationCheckpoint keys = Keys(2);
  keys.rotations[3 * 32 * 32] += 0.001F;
  EXPECT_THAT(ErrorOf(ImportProfile(keys, Values(), std::nullopt, {})),
              AllOf(HasSubstr("--k's layer 1, KV head 1 is not orthogonal"),
                    HasSubstr("at most 0.0001 is allowed")));
  const auto good = ImportProfile(Keys(2), Values(), std::nullopt, {});
  EXPECT_LT(good->key_orthogonality, 1e-6);
}

TEST(ImportProfileTest, OptionsOutOfRangeAreNamed) {
  EXPECT_THAT(ErrorOf(ImportProfile(Keys(2), Values(), std::nullopt, {.key_clip = 1.5F})),
              HasSubstr("--key-clip is 1.5"));
  EXPECT_THAT(ErrorOf(ImportProfile(Keys(2), Values(), std::nullopt, {.damping = 0})),
              HasSubstr("--damping is 0"));
}

}  // namespace
}  // namespace crumb::calibrate
