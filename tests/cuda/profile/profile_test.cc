// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "proto/base/file.h"
#include "tests/cuda/profile/profile_files.h"
#include "tests/cuda/profile/profile_parts.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::ElementsAreArray;
using testing::HasSubstr;

constexpr size_t kKeyDim = 32;
constexpr size_t kValueDim = 64;

std::span<const float> Matrix(const std::vector<float>& all, size_t index, size_t dim) {
  return std::span(all).subspan(index * dim * dim, dim * dim);
}

class ProfileTest : public testing::TestWithParam<CodecId> {};

TEST_P(ProfileTest, WhatWasWrittenIsRead) {
  const ProfileParts parts = SmallParts(GetParam());
  const auto profile = Profile::Parse(FileOf(parts));
  ASSERT_TRUE(profile.ok()) << profile.status();
  EXPECT_EQ((*profile)->model(), "small");
  EXPECT_EQ((*profile)->geometry(), parts.geometry);
  EXPECT_EQ((*profile)->codec(), parts.codec);
  EXPECT_EQ((*profile)->windows(), parts.windows);
  for (uint32_t index = 0; index < 4; ++index) {
    const HeadParameters& head = (*profile)->head(index / 2, index % 2);
    EXPECT_EQ(head.key_dim, kKeyDim);
    EXPECT_EQ(head.value_dim, kValueDim);
    EXPECT_EQ(head.codec, parts.codec);
    EXPECT_EQ(head.key_clip, parts.key_clip[index]);
    EXPECT_EQ(head.value_clip, parts.value_clip[index]);
    EXPECT_THAT(std::span(head.key_rotation, kKeyDim * kKeyDim),
                ElementsAreArray(Matrix(parts.key_rotation, index, kKeyDim)));
    EXPECT_THAT(std::span(head.value_rotation, kValueDim * kValueDim),
                ElementsAreArray(Matrix(parts.value_rotation, index, kValueDim)));
  }
}

TEST(ProfileCodecTest, AwareKeysHaveAMeanAndAFeedbackFactor) {
  const ProfileParts parts = SmallParts(CodecId::kOscarInt2Aware);
  const auto profile = Profile::Parse(FileOf(parts));
  ASSERT_TRUE(profile.ok()) << profile.status();
  for (uint32_t index = 0; index < 4; ++index) {
    const HeadParameters& head = (*profile)->head(index / 2, index % 2);
    EXPECT_THAT(std::span(head.key_feedback, kKeyDim * kKeyDim),
                ElementsAreArray(Matrix(parts.key_feedback, index, kKeyDim)));
    EXPECT_THAT(std::span(head.key_mean, kKeyDim),
                ElementsAreArray(std::span(parts.key_mean).subspan(index * kKeyDim, kKeyDim)));
  }
}

TEST(ProfileCodecTest, TiltedKeysHaveAMetricAndQueriesOfTheirOwn) {
  const ProfileParts parts = SmallParts(CodecId::kOscarInt2Tilted);
  const auto profile = Profile::Parse(FileOf(parts));
  ASSERT_TRUE(profile.ok()) << profile.status();
  for (uint32_t index = 0; index < 4; ++index) {
    const HeadParameters& head = (*profile)->head(index / 2, index % 2);
    EXPECT_THAT(std::span(head.query_rotation, kKeyDim * kKeyDim),
                ElementsAreArray(Matrix(parts.query_rotation, index, kKeyDim)));
    EXPECT_THAT(std::span(head.key_metric, kKeyDim * kKeyDim),
                ElementsAreArray(Matrix(parts.key_metric, index, kKeyDim)));
    EXPECT_THAT(std::span(head.query_mean, kKeyDim),
                ElementsAreArray(std::span(parts.query_mean).subspan(index * kKeyDim, kKeyDim)));
  }
}

TEST(ProfileCodecTest, WhatTiltedKeysNeedIsCheckedByName) {
  const auto spoil = [](auto what) {
    ProfileParts parts = SmallParts(CodecId::kOscarInt2Tilted);
    what(&parts);
    return ErrorOf(parts);
  };
  EXPECT_THAT(spoil([](ProfileParts* p) { p->query_rotation[1024 * 3 + 1] += 0.1F; }),
              AllOf(HasSubstr("'key_rotation.1[1]'"), HasSubstr("not inverse"),
                    HasSubstr("at most 0.001")));
  EXPECT_THAT(spoil([](ProfileParts* p) { p->query_rotation.clear(); }),
              HasSubstr("'query_rotation.0' is missing"));
  EXPECT_THAT(spoil([](ProfileParts* p) { p->query_mean.clear(); }),
              HasSubstr("'query_mean' is missing"));
  EXPECT_THAT(spoil([](ProfileParts* p) { p->key_metric.clear(); }),
              HasSubstr("'key_metric.0' is missing"));
  EXPECT_THAT(spoil([](ProfileParts* p) { p->key_metric[1024 + 1] += 1; }),
              AllOf(HasSubstr("'key_metric.0[1]' is not symmetric"), HasSubstr("(1, 0)")));
  EXPECT_THAT(spoil([](ProfileParts* p) { p->key_metric[1024 * 2] = 0; }),
              AllOf(HasSubstr("'key_metric.1[0]'"), HasSubstr("must be positive")));
  ProfileParts aware = SmallParts(CodecId::kOscarInt2Tilted);
  aware.codec = CodecId::kOscarInt2Aware;
  EXPECT_THAT(ErrorOf(aware), HasSubstr("not orthogonal"));
}

TEST(ProfileCodecTest, KeysRoundedToNearestHaveNoFactorAndAMeanOfZero) {
  const auto profile = Profile::Parse(FileOf(SmallParts(CodecId::kOscarInt2)));
  ASSERT_TRUE(profile.ok()) << profile.status();
  EXPECT_EQ((*profile)->head(1, 1).key_feedback, nullptr);
  EXPECT_THAT(std::span((*profile)->head(1, 1).key_mean, kKeyDim), Each(0.0F));
}

TEST(ProfileCodecTest, ValuesAreRoundedByDeviationWhereTheProfileSaysSo) {
  ProfileParts parts = SmallParts(CodecId::kOscarInt2Tilted);
  const auto levels_of = [](const ProfileParts& from) {
    const auto profile = Profile::Parse(FileOf(from));
    std::vector<bool> levels;
    for (uint32_t index = 0; index < 4; ++index) {
      levels.push_back((*profile)->head(index / 2, index % 2).values_by_deviation);
    }
    return levels;
  };
  EXPECT_THAT(levels_of(parts), ElementsAre(false, false, false, true));
  parts.value_levels.clear();
  EXPECT_THAT(levels_of(parts), Each(false));
  EXPECT_THAT(levels_of(SmallParts(CodecId::kOscarInt2Lm)), Each(true));
  parts.value_levels = {0, 1, 2, 0};
  EXPECT_THAT(ErrorOf(parts),
              AllOf(HasSubstr("'value_levels'"), HasSubstr("layer 1, KV head 0 is 2"),
                    HasSubstr("0 (within a range)")));
  parts.value_levels = {0, 1, 0, 0};
  EXPECT_THAT(ErrorOf(parts),
              AllOf(HasSubstr("'value_clip'"), HasSubstr("layer 0, KV head 1 is 0.91"),
                    HasSubstr("have no clip")));
  ProfileParts lm = SmallParts(CodecId::kOscarInt2Lm);
  lm.key_clip[2] = 0.9F;
  EXPECT_THAT(ErrorOf(lm), AllOf(HasSubstr("'key_clip'"), HasSubstr("layer 1, KV head 0 is 0.9")));
  lm.key_clip[2] = 0;
  lm.value_levels = {1, 1, 1, 1};
  EXPECT_THAT(ErrorOf(lm), AllOf(HasSubstr("'value_levels'"), HasSubstr("has no place")));
}

TEST(ProfileCodecTest, KeysTryTheCodecsRangesUnlessTheProfileHasOthers) {
  ProfileParts parts = SmallParts(CodecId::kOscarInt2Aware);
  const auto ranges_of = [](const ProfileParts& from) {
    return (*Profile::Parse(FileOf(from)))->head(1, 0).key_ranges;
  };
  EXPECT_EQ(ranges_of(parts), kKeyRanges);
  parts.key_ranges.assign(size_t{4} * 3, 0.5F);
  parts.key_ranges[6] = 1;
  EXPECT_EQ(ranges_of(parts), (std::array<float, 3>{1, 0.5F, 0.5F}));
  for (const float bad : {0.0F, -1.0F, 1.01F}) {
    parts.key_ranges[7] = bad;
    EXPECT_THAT(ErrorOf(parts), AllOf(HasSubstr("'key_ranges'"), HasSubstr("layer 1, KV head 0"),
                                      HasSubstr("above 0 and at most 1")));
  }
  ProfileParts nearest = SmallParts(CodecId::kOscarInt2);
  nearest.key_ranges.assign(size_t{4} * 3, 0.5F);
  EXPECT_THAT(ErrorOf(nearest), AllOf(HasSubstr("'key_ranges'"), HasSubstr("has no place")));
}

TEST(ProfileCodecTest, NamesAreThoseOfTheFile) {
  for (const CodecId codec : kCodecs) {
    EXPECT_EQ(CodecFromName(CodecName(codec)), codec);
  }
  EXPECT_EQ(CodecFromName("oscar"), std::nullopt);
}

TEST_P(ProfileTest, MatricesLieOnCacheLines) {
  const auto profile = Profile::Parse(FileOf(SmallParts(GetParam())));
  ASSERT_TRUE(profile.ok());
  const HeadParameters& head = (*profile)->head(1, 1);
  for (const float* matrix : {head.key_rotation, head.value_rotation, head.key_feedback,
                              head.query_rotation, head.key_metric, head.query_mean}) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(matrix) % 64, 0U);  // Null is: no factor.
  }
}

TEST_P(ProfileTest, HeadsMayShareALayersRotation) {
  const ProfileParts parts = SmallParts(GetParam(), /*per_head=*/false);
  const auto profile = Profile::Parse(FileOf(parts));
  ASSERT_TRUE(profile.ok()) << profile.status();
  EXPECT_EQ((*profile)->head(1, 0).key_rotation, (*profile)->head(1, 1).key_rotation);
  EXPECT_EQ((*profile)->head(1, 0).value_rotation, (*profile)->head(1, 1).value_rotation);
  EXPECT_NE((*profile)->head(0, 0).key_rotation, (*profile)->head(1, 0).key_rotation);
  EXPECT_THAT(std::span((*profile)->head(1, 1).key_rotation, kKeyDim * kKeyDim),
              ElementsAreArray(Matrix(parts.key_rotation, 1, kKeyDim)));
}

TEST_P(ProfileTest, EqualPartsMakeEqualBytes) {
  EXPECT_EQ(FileOf(SmallParts(GetParam())), FileOf(SmallParts(GetParam())));
}

TEST_P(ProfileTest, EveryTruncationIsRefused) {
  const auto file = FileOf(SmallParts(GetParam()));
  const size_t header_end = file.size() - SplitFile::Of(file).data.size();
  std::set<size_t> sizes = {file.size() - 1, file.size() - 4, file.size() / 2};
  for (size_t size = 0; size <= header_end + 64; ++size) {
    sizes.insert(size);
  }
  for (size_t size = header_end; size < file.size(); size += 509) {
    sizes.insert(size);
  }
  for (const size_t size : sizes) {
    EXPECT_NE(ErrorOf({file.begin(), file.begin() + static_cast<ptrdiff_t>(size)}), "accepted")
        << "first " << size << " of " << file.size() << " bytes";
  }
}

TEST_P(ProfileTest, AByteMoreIsRefused) {
  auto file = FileOf(SmallParts(GetParam()));
  file.push_back({});
  EXPECT_THAT(ErrorOf(file), HasSubstr("bytes of data"));
}

INSTANTIATE_TEST_SUITE_P(Codecs, ProfileTest, testing::ValuesIn(kCodecs), [](const auto& instance) {
  return instance.param == CodecId::kOscarInt2        ? "OscarInt2"
         : instance.param == CodecId::kOscarInt2Lm    ? "OscarInt2Lm"
         : instance.param == CodecId::kOscarInt2Aware ? "OscarInt2Aware"
                                                      : "OscarInt2Tilted";
});

TEST(ProfileIdTest, IsTheHashOfTheFile) {
  const auto file = FileOf(SmallParts(CodecId::kOscarInt2));
  const auto profile = Profile::Parse(file);
  ASSERT_TRUE(profile.ok());
  // By another program over a file of the same bytes.
  const auto path = std::filesystem::path(testing::TempDir()) / "profile_id_test.safetensors";
  ASSERT_TRUE(WriteFileAtomically(path, file).ok());
  FILE* sum = popen(("sha256sum " + path.string()).c_str(), "r");
  ASSERT_NE(sum, nullptr);
  char hex[65] = {};
  ASSERT_EQ(std::fread(hex, 1, 64, sum), 64U);
  pclose(sum);
  EXPECT_EQ((*profile)->id().Hex(), hex);
  EXPECT_TRUE(std::ranges::equal((*profile)->file(), file));
}

TEST(ProfileIdTest, ChangesWithAnyPart) {
  const ProfileParts base = SmallParts(CodecId::kOscarInt2Aware);
  std::set<std::string> ids;
  size_t count = 0;
  const auto add = [&](const ProfileParts& parts) {
    const auto profile = Profile::Parse(FileOf(parts));
    ASSERT_TRUE(profile.ok());
    ids.insert((*profile)->id().Hex());
    ++count;
  };
  add(base);
  const auto change = [&](auto what) {
    ProfileParts parts = base;
    what(&parts);
    add(parts);
  };
  change([](ProfileParts* parts) { parts->model = "other"; });
  change([](ProfileParts* parts) { parts->windows.sink_tokens = 0; });
  change([](ProfileParts* parts) { parts->windows.recent_tokens = 256; });
  change([](ProfileParts* parts) { parts->key_clip[3] = 0.5F; });
  change([](ProfileParts* parts) { parts->value_clip[0] = 0.5F; });
  change([](ProfileParts* parts) { parts->value_levels[3] = 0; });
  change([](ProfileParts* parts) { parts->key_ranges.assign(size_t{4} * 3, 0.5F); });
  change([](ProfileParts* parts) { parts->key_mean[5] += 0x1p-20F; });
  change([](ProfileParts* parts) { parts->key_feedback[5] += 0x1p-20F; });
  change([](ProfileParts* parts) { parts->key_rotation[5] += 0x1p-20F; });
  change([](ProfileParts* parts) { parts->value_rotation[5] += 0x1p-20F; });
  change([](ProfileParts* parts) {
    parts->codec = CodecId::kOscarInt2;
    parts->key_feedback.clear();
  });
  change([](ProfileParts* parts) { parts->key_mean.clear(); });
  EXPECT_EQ(ids.size(), count);
}

}  // namespace
}  // namespace crumb
