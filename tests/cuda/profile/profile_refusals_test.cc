// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <limits>

#include "crumb/cuda/profile.h"
#include "proto/base/file.h"
#include "tests/cuda/profile/profile_files.h"
#include "tests/cuda/profile/profile_parts.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

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
