// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>

#include "cuda/profile/safetensors.h"
#include "proto/base/file.h"
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
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<std::byte> FileOf(const ProfileParts& parts) {
  auto file = Profile::Serialize(parts);
  EXPECT_TRUE(file.ok()) << file.status();
  return file.ok() ? *std::move(file) : std::vector<std::byte>();
}

std::string ErrorOf(std::vector<std::byte> file) {
  const auto profile = Profile::Parse(std::move(file));
  if (profile.ok()) {
    return "accepted";
  }
  EXPECT_EQ(profile.status().code(), absl::StatusCode::kInvalidArgument) << profile.status();
  return std::string(profile.status().message());
}

std::string ErrorOf(const ProfileParts& parts) {
  const auto file = Profile::Serialize(parts);
  return file.ok() ? "accepted" : std::string(file.status().message());
}

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

TEST(ProfileMetadataTest, EachBadFieldIsNamedWithItsValueAndLimit) {
  struct BadField {
    const char* from;
    const char* to;
    std::vector<const char*> words;
  };
  const std::vector<BadField> fields = {
      {"crumb.profile.v1", "crumb.profile.v9", {"'format'", "crumb.profile.v9", "alone"}},
      {"\"codec\":\"oscar-int2\"", "\"codec\":\"int3\"", {"'codec'", "int3", "oscar-int2-aware"}},
      {"\"codec\":\"oscar-int2\",", "", {"'codec'", "missing"}},
      {"\"num_layers\":\"2\"", "\"num_layers\":\"0\"", {"'num_layers' is 0", "1 to 512"}},
      {"\"num_layers\":\"2\"", "\"num_layers\":\"513\"", {"'num_layers' is 513", "1 to 512"}},
      {"\"num_layers\":\"2\"", "\"num_layers\":\"-2\"", {"'num_layers' is '-2'", "whole number"}},
      {"\"num_layers\":\"2\"", "\"num_layers\":\"2 \"", {"'num_layers' is '2 '"}},
      {"\"num_layers\":\"2\"", "\"num_layers\":\"\"", {"'num_layers' is ''"}},
      {"\"num_layers\":\"2\"",
       "\"num_layers\":\"4294967298\"",
       {"'num_layers' is 4294967298", "1 to 512"}},
      {"\"num_layers\":\"2\"", "\"num_layers\":2", {"'num_layers' is not a string"}},
      {"\"num_layers\":\"2\"",
       "\"num_layers\":\"3\"",
       {"'key_rotation.2' is missing", "[2, 32, 32]"}},
      {"\"num_kv_heads\":\"2\"", "\"num_kv_heads\":\"65\"", {"'num_kv_heads' is 65", "1 to 64"}},
      {"\"num_kv_heads\":\"2\"",
       "\"num_kv_heads\":\"1\"",
       {"'key_rotation.0'", "[2, 32, 32]", "expected F32 [1, 32, 32]"}},
      {"\"key_dim\":\"32\"", "\"key_dim\":\"48\"", {"'key_dim' is 48", "multiple of 32"}},
      {"\"key_dim\":\"32\"", "\"key_dim\":\"1024\"", {"'key_dim' is 1024", "1 to 512"}},
      {"\"key_dim\":\"32\"",
       "\"key_dim\":\"64\"",
       {"'key_rotation.0'", "expected F32 [2, 64, 64]"}},
      {"\"value_dim\":\"64\"", "\"value_dim\":\"0\"", {"'value_dim' is 0"}},
      {"\"page_tokens\":\"64\"", "\"page_tokens\":\"16\"", {"'page_tokens' is 16", "64 to 64"}},
      {"\"sink_tokens\":\"64\"",
       "\"sink_tokens\":\"65\"",
       {"'sink_tokens' is 65", "multiple of 64"}},
      {"\"recent_tokens\":\"128\"",
       "\"recent_tokens\":\"4294967232\"",
       {"'recent_tokens' is 4294967232", "0 to 1048576"}},
      {"\"model\":\"small\",", "", {"'model'", "missing"}},
  };
  const auto good = FileOf(SmallParts(CodecId::kOscarInt2));
  for (const BadField& field : fields) {
    const std::string error = ErrorOf(SplitFile::Of(good).Replace(field.from, field.to).Join());
    for (const char* word : field.words) {
      EXPECT_THAT(error, HasSubstr(word)) << field.to;
    }
  }
}

TEST(ProfileTensorTest, MissingForeignAndMisshapenTensorsAreNamed) {
  const auto aware = FileOf(SmallParts(CodecId::kOscarInt2Aware));
  const auto rename = [&](const char* from, const char* to) {
    return ErrorOf(SplitFile::Of(aware).Replace(from, to).Join());
  };
  EXPECT_THAT(rename("\"key_rotation.1\"", "\"key_rotation.x\""),
              AllOf(HasSubstr("'key_rotation.1' is missing"), HasSubstr("[2, 32, 32]")));
  EXPECT_THAT(rename("\"value_rotation.0\"", "\"value_rotation.9\""),
              HasSubstr("'value_rotation.0' is missing"));
  EXPECT_THAT(rename("\"key_feedback.1\"", "\"key_feedback.7\""),
              HasSubstr("'key_feedback.1' is missing"));
  EXPECT_THAT(rename("\"key_clip\"", "\"key_clop\""), HasSubstr("'key_clip' is missing"));
  EXPECT_THAT(rename("\"value_clip\"", "\"value_clop\""), HasSubstr("'value_clip' is missing"));
  EXPECT_THAT(rename("\"key_mean\"", "\"key_mena\""),
              AllOf(HasSubstr("'key_mena' [2, 2, 32] has no place")));
  EXPECT_THAT(rename("\"shape\":[2,2,32]", "\"shape\":[4,32]"),
              AllOf(HasSubstr("'key_mean'"), HasSubstr("[4, 32]"), HasSubstr("[2, 2, 32]")));
  EXPECT_THAT(rename("\"shape\":[2,2,32]", "\"shape\":[2,1,64]"), HasSubstr("'key_mean'"));
  EXPECT_THAT(rename("\"dtype\":\"F32\",\"shape\":[2,2,32]", "\"dtype\":\"F64\",\"shape\":[2,32]"),
              AllOf(HasSubstr("'key_mean'"), HasSubstr("F64"), HasSubstr("expected F32")));
  // Another codec's file has a tensor too many.
  EXPECT_THAT(rename("oscar-int2-aware", "oscar-int2"),
              AllOf(HasSubstr("'key_feedback.0'"), HasSubstr("codec oscar-int2")));
}

TEST(ProfileTensorTest, ValuesThatCannotBeAreNamedWithTheirPlace) {
  const ProfileParts base = SmallParts(CodecId::kOscarInt2Aware);
  const auto spoil = [&](auto what) {
    ProfileParts parts = base;
    what(&parts);
    return ErrorOf(parts);
  };
  EXPECT_THAT(spoil([](ProfileParts* p) { p->key_rotation[1024 * 3 + 7] = kNan; }),
              AllOf(HasSubstr("'key_rotation.1'"), HasSubstr("[2, 32, 32]"),
                    HasSubstr("element 1031 is NaN")));
  EXPECT_THAT(
      spoil([](ProfileParts* p) { p->value_rotation[5] = std::numeric_limits<float>::infinity(); }),
      AllOf(HasSubstr("'value_rotation.0'"), HasSubstr("element 5 is infinite")));
  EXPECT_THAT(spoil([](ProfileParts* p) { p->key_mean[64] = kNan; }),
              AllOf(HasSubstr("'key_mean'"), HasSubstr("element 64")));
  EXPECT_THAT(spoil([](ProfileParts* p) { p->key_clip[1] = kNan; }), HasSubstr("'key_clip'"));
  EXPECT_THAT(spoil([](ProfileParts* p) { p->value_clip[3] = 1.5F; }),
              AllOf(HasSubstr("'value_clip' [2, 2]"), HasSubstr("layer 1, KV head 1"),
                    HasSubstr("1.5"), HasSubstr("at most 1")));
  EXPECT_THAT(spoil([](ProfileParts* p) { p->key_feedback[1024 + 33] = 0; }),
              AllOf(HasSubstr("'key_feedback.0[1]'"), HasSubstr("element 1 of the diagonal"),
                    HasSubstr("positive")));
  EXPECT_THAT(spoil([](ProfileParts* p) { p->key_feedback[32 * 3 + 1] = 1e-20F; }),
              AllOf(HasSubstr("'key_feedback.0[0]'"), HasSubstr("row 3, column 1")));
}

TEST(ProfileTensorTest, ARotationThatDoesNotKeepLengthsIsRefused) {
  const ProfileParts base = SmallParts(CodecId::kOscarInt2);
  ProfileParts parts = base;
  parts.key_rotation[1024] += 0.1F;
  EXPECT_THAT(ErrorOf(parts), AllOf(HasSubstr("'key_rotation.0[1]' is not orthogonal"),
                                    HasSubstr("at most 0.001")));
  parts = base;
  for (float& x : parts.value_rotation) {
    x *= 1.001F;
  }
  EXPECT_THAT(ErrorOf(parts), HasSubstr("'value_rotation.0[0]' is not orthogonal"));
  parts = base;
  for (float& x : parts.value_rotation) {
    x *= 1.0001F;  // Within the limit.
  }
  EXPECT_EQ(ErrorOf(parts), "accepted");
  parts = SmallParts(CodecId::kOscarInt2, /*per_head=*/false);
  std::fill(parts.key_rotation.begin() + 1024, parts.key_rotation.end(), 0.0F);
  EXPECT_THAT(ErrorOf(parts), HasSubstr("'key_rotation.1' is not orthogonal"));
}

TEST(ProfilePartsTest, PartsOfAnotherSizeAreRefused) {
  const ProfileParts base = SmallParts(CodecId::kOscarInt2Aware);
  for (std::vector<float> ProfileParts::*member :
       {&ProfileParts::key_rotation, &ProfileParts::value_rotation, &ProfileParts::key_mean,
        &ProfileParts::key_feedback, &ProfileParts::key_clip, &ProfileParts::value_clip}) {
    ProfileParts parts = base;
    (parts.*member).pop_back();
    EXPECT_THAT(ErrorOf(parts), AllOf(HasSubstr(std::to_string((parts.*member).size())),
                                      HasSubstr(std::to_string((base.*member).size()))));
  }
  ProfileParts parts = base;
  parts.geometry.key_dim = 33;
  EXPECT_THAT(ErrorOf(parts), HasSubstr("geometry"));
}

TEST(ProfileLoadTest, SaysWhatIsWrongWithTheFile) {
  const std::filesystem::path folder = testing::TempDir();
  const auto missing = Profile::Load(folder / "no_such_profile");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("no_such_profile"));
  EXPECT_THAT(std::string(Profile::Load(folder).status().message()),
              HasSubstr("not a regular file"));

  const auto path = folder / "profile_load_test.safetensors";
  ASSERT_TRUE(WriteFileAtomically(path, FileOf(SmallParts(CodecId::kOscarInt2))).ok());
  const auto loaded = Profile::Load(path);
  ASSERT_TRUE(loaded.ok()) << loaded.status();

  std::filesystem::resize_file(path, 100);
  const auto truncated = Profile::Load(path);
  EXPECT_THAT(std::string(truncated.status().message()),
              AllOf(HasSubstr("profile_load_test.safetensors"), HasSubstr("truncated")));

  // A sparse file, refused before a byte of it is read.
  std::filesystem::resize_file(path, (uint64_t{1} << 30) + 1);
  EXPECT_THAT(std::string(Profile::Load(path).status().message()), HasSubstr("at most 536870912"));
}

}  // namespace
}  // namespace crumb
