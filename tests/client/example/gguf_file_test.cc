// SPDX-License-Identifier: Apache-2.0
#include "client/example/gguf_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>

#include "tests/client/example/gguf_builder.h"

namespace crumb::example {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

GgufBuilder SmallFile() {
  GgufBuilder builder;
  builder.Key("general.architecture", "llama")
      .Key("llama.block_count", uint32_t{3})
      .Key("llama.rope.freq_base", 10000.0f)
      .Key("tokens", std::vector<std::string>{"a", "", "long one"})
      .Key("types", std::vector<int32_t>{1, -2, 3})
      .FloatTensor("small", {2, 3}, {1, 2, 3, 4, 5, 6})
      .FloatTensor("vector", {4}, {7, 8, 9, 10});
  return builder;
}

std::string ErrorOf(const std::string& file) {
  const absl::StatusOr<GgufContents> contents = ParseGguf(AsBytes(file));
  if (!contents.ok()) {
    EXPECT_EQ(contents.status().code(), absl::StatusCode::kInvalidArgument);
  }
  return contents.ok() ? "accepted" : std::string(contents.status().message());
}

class GgufFileTest : public ::testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(path_); }
  absl::StatusOr<std::unique_ptr<GgufFile>> Write(const std::string& bytes) {
    std::ofstream(path_, std::ios::binary) << bytes;
    return GgufFile::Open(path_);
  }
  const std::filesystem::path path_ =
      std::filesystem::path(::testing::TempDir()) / "gguf_file_test.gguf";
};

TEST_F(GgufFileTest, ReadsKeysOfEveryKindItNeeds) {
  const auto file = Write(SmallFile().Build());
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(*(*file)->GetString("general.architecture"), "llama");
  EXPECT_EQ(*(*file)->GetUint("llama.block_count", 1, 100), 3u);
  EXPECT_EQ(*(*file)->GetFloat("llama.rope.freq_base"), 10000.0f);
  EXPECT_THAT(*(*file)->GetStrings("tokens"), ::testing::ElementsAre("a", "", "long one"));
  EXPECT_THAT(*(*file)->GetIntegers("types"), ::testing::ElementsAre(1, -2, 3));
  EXPECT_TRUE((*file)->HasKey("types"));
  EXPECT_FALSE((*file)->HasKey("absent"));
}

TEST_F(GgufFileTest, FindsTensorsInPlace) {
  const auto file = Write(SmallFile().Build(/*version=*/2));
  ASSERT_TRUE(file.ok()) << file.status();
  const GgufTensor* tensor = (*file)->FindTensor("small");
  ASSERT_NE(tensor, nullptr);
  EXPECT_EQ(tensor->num_columns(), 2u);
  EXPECT_EQ(tensor->num_rows(), 3u);
  float values[6];
  ASSERT_EQ(tensor->bytes.size(), sizeof(values));
  std::memcpy(values, tensor->bytes.data(), sizeof(values));
  EXPECT_THAT(values, ::testing::ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_EQ((*file)->FindTensor("absent"), nullptr);
}

TEST_F(GgufFileTest, NamesTheKeyThatIsNotAsExpected) {
  const auto file = Write(SmallFile().Build());
  ASSERT_TRUE(file.ok());
  EXPECT_THAT((*file)->GetUint("absent", 0, 9).status().message(), HasSubstr("absent"));
  EXPECT_THAT((*file)->GetString("llama.block_count").status().message(),
              HasSubstr("not a string"));
  EXPECT_THAT((*file)->GetUint("llama.block_count", 4, 9).status().message(),
              AllOf(HasSubstr("llama.block_count is 3"), HasSubstr("from 4 to 9")));
}

TEST_F(GgufFileTest, NamesTheFileThatCannotBeRead) {
  const auto missing = GgufFile::Open("/nonexistent/model.gguf");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(missing.status().message(), HasSubstr("/nonexistent/model.gguf"));
  EXPECT_THAT(Write("").status().message(), AllOf(HasSubstr(path_.string()), HasSubstr("empty")));
  EXPECT_THAT(Write("GGUX....").status().message(), HasSubstr(path_.string()));
}

TEST(GgufParserTest, RefusesOtherFilesAndVersions) {
  EXPECT_THAT(ErrorOf("PK\x03\x04 not a model"), HasSubstr("does not start with"));
  EXPECT_THAT(ErrorOf(GgufBuilder().Build(1)), HasSubstr("version 1"));
  EXPECT_THAT(ErrorOf(GgufBuilder().Build(4)), HasSubstr("version 4"));
}

TEST(GgufParserTest, RefusesEveryTruncation) {
  const std::string whole = SmallFile().Build();
  ASSERT_TRUE(ParseGguf(AsBytes(whole)).ok());
  // The last tensor's 16 bytes end 16 before the padded end.
  for (size_t length = 0; length < whole.size() - 16; ++length) {
    EXPECT_NE(ErrorOf(whole.substr(0, length)), "accepted") << "of " << length << " bytes";
  }
}

TEST(GgufParserTest, RefusesCountsAndLengthsThatTheFileCannotHold) {
  for (const uint64_t lie : {uint64_t{1} << 20, uint64_t{1} << 40, ~uint64_t{0}}) {
    std::string tensors = SmallFile().Build();
    std::memcpy(tensors.data() + 8, &lie, sizeof(lie));
    EXPECT_THAT(ErrorOf(tensors), HasSubstr("number of tensors"));
    std::string keys = SmallFile().Build();
    std::memcpy(keys.data() + 16, &lie, sizeof(lie));
    EXPECT_THAT(ErrorOf(keys), HasSubstr("number of keys"));

    std::string length;
    GgufBuilder::Put(length, lie);
    EXPECT_THAT(ErrorOf(GgufBuilder().RawKey("greeting", 8, length).Build()),
                HasSubstr("greeting"));
    std::string array;
    GgufBuilder::Put(array, uint32_t{4});
    GgufBuilder::Put(array, lie);
    EXPECT_THAT(ErrorOf(GgufBuilder().RawKey("numbers", 9, array).Build()), HasSubstr("numbers"));
  }
}

TEST(GgufParserTest, RefusesTensorsThatDoNotFit) {
  const auto with_tensor = [](const std::vector<uint64_t>& dims, uint32_t type, uint64_t offset) {
    return ErrorOf(GgufBuilder().RawTensor("w", dims, type, offset, std::string(64, 'x')).Build());
  };
  EXPECT_EQ(with_tensor({16}, 0, 0), "accepted");
  EXPECT_THAT(with_tensor({17}, 0, 0), AllOf(HasSubstr("tensor w"), HasSubstr("+ 68")));
  EXPECT_THAT(with_tensor({16}, 0, 32), HasSubstr("tensor w lies at bytes [32"));
  EXPECT_THAT(with_tensor({8}, 0, 7), HasSubstr("aligned to 32"));
  EXPECT_THAT(with_tensor({8}, 0, ~uint64_t{31}), HasSubstr("tensor w"));
  EXPECT_THAT(with_tensor({}, 0, 0), HasSubstr("0 dimensions"));
  EXPECT_THAT(with_tensor({1, 1, 1, 1, 1}, 0, 0), HasSubstr("5 dimensions"));
  EXPECT_THAT(with_tensor({0}, 0, 0), HasSubstr("dimension 0 = 0"));
  EXPECT_THAT(with_tensor({uint64_t{1} << 32, uint64_t{1} << 32}, 0, 0), HasSubstr("dimension 0"));
  EXPECT_THAT(with_tensor({16}, 2, 0), HasSubstr("Q4_0 packs 32"));
  EXPECT_THAT(with_tensor({16}, 99, 0), AllOf(HasSubstr("ggml type 99"), HasSubstr("Q6_K")));
}

TEST(GgufParserTest, RefusesTheSameNameTwice) {
  EXPECT_THAT(ErrorOf(GgufBuilder().Key("a", uint32_t{1}).Key("a", uint32_t{2}).Build()),
              HasSubstr("key a is there twice"));
  EXPECT_THAT(ErrorOf(GgufBuilder().FloatTensor("t", {1}, {1}).FloatTensor("t", {1}, {1}).Build()),
              HasSubstr("tensor t is there twice"));
}

TEST(GgufParserTest, RefusesUnknownTypesAndAlignments) {
  EXPECT_THAT(ErrorOf(GgufBuilder().RawKey("odd", 77, "").Key("k", 1.0f).Build()),
              AllOf(HasSubstr("odd"), HasSubstr("77")));
  EXPECT_THAT(ErrorOf(GgufBuilder().Key("general.alignment", uint32_t{0}).Build()),
              HasSubstr("general.alignment"));
}

TEST(GgufParserTest, SurvivesRandomDamage) {
  const std::string whole = SmallFile().Build();
  const auto seed = std::random_device()();
  std::mt19937 random(seed);
  for (int round = 0; round < 20000; ++round) {
    std::string damaged = whole;
    for (uint32_t i = 0; i <= random() % 4; ++i) {
      damaged[random() % damaged.size()] = static_cast<char>(random());
    }
    const auto contents = ParseGguf(AsBytes(damaged));
    if (!contents.ok()) {
      continue;
    }
    for (const auto& [name, tensor] : contents->tensors) {
      const char* start = reinterpret_cast<const char*>(tensor.bytes.data());
      ASSERT_TRUE(start >= damaged.data() &&
                  start + tensor.bytes.size() <= damaged.data() + damaged.size())
          << "seed " << seed << ", tensor " << name;
    }
  }
}

}  // namespace
}  // namespace crumb::example
