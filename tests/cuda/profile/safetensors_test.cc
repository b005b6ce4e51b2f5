// SPDX-License-Identifier: Apache-2.0
#include "cuda/profile/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "tests/cuda/profile/profile_parts.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

std::vector<std::byte> File(const std::string& header, size_t data_bytes) {
  return SplitFile{.header = header, .data = std::vector<std::byte>(data_bytes)}.Join();
}

std::string ErrorOf(std::span<const std::byte> file) {
  const auto parsed = ParseSafetensors(file);
  if (parsed.ok()) {
    return "accepted";
  }
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(parsed.status().message());
}

std::string ErrorOf(const std::string& header, size_t data_bytes) {
  return ErrorOf(File(header, data_bytes));
}

TEST(SafetensorsTest, WhatWasWrittenIsRead) {
  const std::vector<float> floats = {1, 2, 3, 4, 5, 6};
  const std::vector<double> doubles = {0.5, -0.25};
  Safetensors contents;
  contents.metadata = {{"format", "x"}, {"quote", "\"\\\n"}};
  contents.tensors["b"] = {TensorType::kF32, {2, 3}, std::as_bytes(std::span(floats))};
  contents.tensors["a"] = {TensorType::kF64, {2}, std::as_bytes(std::span(doubles))};
  contents.tensors["scalar"] = {TensorType::kF32, {}, std::as_bytes(std::span(floats)).first(4)};
  contents.tensors["none"] = {TensorType::kF32, {0, 7}, {}};
  const auto file = SerializeSafetensors(contents);
  const auto parsed = ParseSafetensors(file);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->metadata, contents.metadata);
  ASSERT_EQ(parsed->tensors.size(), 4U);
  std::vector<float> read(6);
  EXPECT_TRUE(CopyF32("b", parsed->tensors.at("b"), std::vector<uint64_t>{2, 3}, read).ok());
  EXPECT_EQ(read, floats);
  std::vector<double> read_doubles(2);
  EXPECT_TRUE(CopyF64("a", parsed->tensors.at("a"), std::vector<uint64_t>{2}, read_doubles).ok());
  EXPECT_EQ(read_doubles, doubles);
  EXPECT_TRUE(parsed->tensors.at("scalar").shape.empty());
  EXPECT_THAT(parsed->tensors.at("none").shape, ElementsAre(0, 7));
}

TEST(SafetensorsTest, BytesAreGolden) {
  const std::vector<float> one = {1.0F};
  Safetensors contents;
  contents.metadata = {{"k", "v"}};
  contents.tensors["t"] = {TensorType::kF32, {1}, std::as_bytes(std::span(one))};
  const std::string header =
      R"({"__metadata__":{"k":"v"},"t":{"data_offsets":[0,4],"dtype":"F32","shape":[1]}} )";
  ASSERT_EQ(header.size() % 8, 0U);
  auto expected = File(header, 0);
  for (const int byte : {0x00, 0x00, 0x80, 0x3f}) {
    expected.push_back(static_cast<std::byte>(byte));
  }
  EXPECT_EQ(SerializeSafetensors(contents), expected);
}

TEST(SafetensorsTest, WiderElementsComeFirstSoThatAllAreAligned) {
  const std::vector<double> doubles = {1, 2};
  Safetensors contents;
  contents.tensors["a"] = {TensorType::kF32, {1}, std::as_bytes(std::span(doubles)).first(4)};
  contents.tensors["z"] = {TensorType::kF64, {2}, std::as_bytes(std::span(doubles))};
  const auto file = SerializeSafetensors(contents);
  const auto parsed = ParseSafetensors(file);
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ((parsed->tensors.at("z").data.data() - file.data()) % 8, 0);
  EXPECT_LT(parsed->tensors.at("z").data.data(), parsed->tensors.at("a").data.data());
}

TEST(SafetensorsTest, RefusesEveryTruncation) {
  const std::vector<float> floats(8);
  Safetensors contents;
  contents.tensors["a"] = {TensorType::kF32, {4}, std::as_bytes(std::span(floats)).first(16)};
  contents.tensors["b"] = {TensorType::kF32, {4}, std::as_bytes(std::span(floats)).last(16)};
  const auto file = SerializeSafetensors(contents);
  for (size_t size = 0; size < file.size(); ++size) {
    EXPECT_NE(ErrorOf(std::span(file).first(size)), "accepted") << "first " << size << " bytes";
  }
  EXPECT_THAT(ErrorOf(std::span(file).first(5)), HasSubstr("the file has 5 bytes"));
  EXPECT_THAT(ErrorOf(std::span(file).first(20)), HasSubstr("the file is truncated"));
  EXPECT_THAT(ErrorOf(std::span(file).first(file.size() - 1)),
              AllOf(HasSubstr("tensor 'b'"), HasSubstr("[4]"), HasSubstr("ends at byte 32"),
                    HasSubstr("31 bytes of data")));
}

TEST(SafetensorsTest, RefusesALyingHeaderLength) {
  const SplitFile file{.header = "{}", .data = {}};
  for (const uint64_t length :
       {uint64_t{3}, uint64_t{1} << 20, std::numeric_limits<uint64_t>::max(),
        std::numeric_limits<uint64_t>::max() - 7}) {
    const auto bytes = file.JoinWithLength(length);
    EXPECT_THAT(ErrorOf(bytes), HasSubstr(std::to_string(length)));
  }
  const auto huge = file.JoinWithLength((uint64_t{1} << 20) + 1);
  EXPECT_THAT(ErrorOf(huge), HasSubstr("at most 1048576"));
}

TEST(SafetensorsTest, RefusesAHeaderThatIsNotItsJson) {
  for (const char* header : {"", "{", "[]", "7", "nul", "{\"a\":}", "{}x", "\xff\xfe{}",
                             "{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}"}) {
    EXPECT_THAT(ErrorOf(header, 4), HasSubstr("not a JSON object")) << header;
  }
}

TEST(SafetensorsTest, RefusesDeepNestingWithoutBuildingIt) {
  const std::string deep = "{\"a\":" + std::string(500000, '[');
  EXPECT_THAT(ErrorOf(deep, 0), HasSubstr("deeper than 3 levels"));
  EXPECT_THAT(ErrorOf(R"({"t":{"dtype":"F32","shape":[[1]],"data_offsets":[0,4]}})", 4),
              HasSubstr("deeper than 3 levels"));
}

TEST(SafetensorsTest, RefusesANameThatComesTwice) {
  const std::string tensor = R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
  EXPECT_THAT(ErrorOf(R"({"t":)" + tensor + R"(,"t":)" + tensor + "}", 4), HasSubstr("'t' twice"));
  EXPECT_THAT(ErrorOf(R"({"__metadata__":{"k":"1","k":"2"}})", 0), HasSubstr("'k' twice"));
  EXPECT_THAT(ErrorOf(R"({"t":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4),
              HasSubstr("'dtype' twice"));
}

TEST(SafetensorsTest, EqualFieldsOfTwoTensorsAreNotTwice) {
  EXPECT_EQ(ErrorOf(R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                    R"("u":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                    8),
            "accepted");
}

TEST(SafetensorsTest, RefusesATensorByNameAndShape) {
  struct BadTensor {
    const char* entry;
    const char* error;
  };
  for (const BadTensor& bad : {
           BadTensor{R"(7)", "not an object of dtype, shape and data_offsets"},
           BadTensor{R"({"dtype":"F32","shape":[1]})", "not an object of dtype"},
           BadTensor{R"({"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1})",
                     "not an object of dtype"},
           BadTensor{R"({"dtype":"F32","shape":[1],"offsets":[0,4]})", "no list data_offsets"},
           BadTensor{R"({"dtype":"BF16","shape":[1],"data_offsets":[0,4]})",
                     "dtype 'BF16' is not F32 or F64"},
           BadTensor{R"({"dtype":4,"shape":[1],"data_offsets":[0,4]})", "has no dtype"},
           BadTensor{R"({"dtype":"F32","shape":1,"data_offsets":[0,4]})", "no list shape"},
           BadTensor{R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})", "whole number"},
           BadTensor{R"({"dtype":"F32","shape":[1.0],"data_offsets":[0,4]})", "whole number"},
           BadTensor{R"({"dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,4]})",
                     "whole number"},
           BadTensor{R"({"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]})",
                     "shape has 9 entries; at most 8"},
           BadTensor{R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})",
                     "shape [2] of F32 has 8 bytes, but its data_offsets [0, 4] span 4"},
           BadTensor{R"({"dtype":"F64","shape":[1],"data_offsets":[0,4]})", "F64 has 8 bytes"},
           BadTensor{R"({"dtype":"F32","shape":[1],"data_offsets":[4,0]})",
                     "[4, 0] are not a begin and an end"},
           BadTensor{R"({"dtype":"F32","shape":[1],"data_offsets":[0]})", "not a begin and an end"},
           BadTensor{R"({"dtype":"F32","shape":[1],"data_offsets":[0,4,8]})",
                     "data_offsets has 3 entries"},
           BadTensor{R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})",
                     "ends at byte 8 of the data, but the file has 4"},
           BadTensor{R"({"dtype":"F32","shape":[0],"data_offsets":[18446744073709551615,0]})",
                     "not a begin and an end"},
           // Both products are 4 in 64 bits that wrap round.
           BadTensor{R"({"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]})",
                     "[4611686018427387905] has more than 2^64 bytes"},
           BadTensor{R"({"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]})",
                     "more than 2^64 bytes"},
       }) {
    const std::string error = ErrorOf(std::string(R"({"weight":)") + bad.entry + "}", 4);
    EXPECT_THAT(error, AllOf(HasSubstr("tensor 'weight'"), HasSubstr(bad.error))) << bad.entry;
  }
}

TEST(SafetensorsTest, RefusesMetadataThatIsNotText) {
  EXPECT_THAT(ErrorOf(R"({"__metadata__":{"layers":7}})", 0),
              HasSubstr("metadata 'layers' is not a string"));
  EXPECT_THAT(ErrorOf(R"({"__metadata__":"x"})", 0), HasSubstr("__metadata__ is not"));
}

TEST(SafetensorsTest, RefusesOverlapGapsAndRemainders) {
  const auto two = [](const char* first, const char* second) {
    return std::string(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":)") + first +
           R"(},"b":{"dtype":"F32","shape":[2],"data_offsets":)" + second + "}}";
  };
  EXPECT_EQ(ErrorOf(two("[0,8]", "[8,16]"), 16), "accepted");
  EXPECT_EQ(ErrorOf(two("[8,16]", "[0,8]"), 16), "accepted");
  EXPECT_THAT(ErrorOf(two("[0,8]", "[4,12]"), 12),
              AllOf(HasSubstr("tensor 'b'"), HasSubstr("begins at byte 4"), HasSubstr("overlaps")));
  EXPECT_THAT(ErrorOf(two("[0,8]", "[0,8]"), 8), HasSubstr("overlaps"));
  EXPECT_THAT(ErrorOf(two("[0,8]", "[12,20]"), 20),
              AllOf(HasSubstr("tensor 'b'"), HasSubstr("gap before it")));
  EXPECT_THAT(ErrorOf(two("[0,8]", "[8,16]"), 17),
              HasSubstr("take 16 bytes, but the file has 17 bytes of data"));
}

TEST(SafetensorsTest, LongAndStrangeNamesAreCutAndEscapedInMessages) {
  const std::string name = std::string(500, 'x');
  const std::string error = ErrorOf("{\"\\u0007" + name + "\":1}", 0);
  EXPECT_LT(error.size(), 200U);
  EXPECT_THAT(error, HasSubstr("\\x07"));
}

TEST(SafetensorsTest, CopyingChecksTypeShapeAndValues) {
  const std::vector<float> floats = {1, std::numeric_limits<float>::quiet_NaN(), 3, 4};
  Tensor tensor{TensorType::kF32, {2, 2}, std::as_bytes(std::span(floats))};
  std::vector<float> out(4);
  const auto message = [&](std::vector<uint64_t> shape) {
    return std::string(CopyF32("w", tensor, shape, out).message());
  };
  EXPECT_THAT(message({2, 2}), AllOf(HasSubstr("'w'"), HasSubstr("element 1 is NaN")));
  EXPECT_THAT(message({4}), HasSubstr("is F32 [2, 2], expected F32 [4]"));
  std::vector<double> doubles(2);
  EXPECT_THAT(std::string(CopyF64("w", tensor, std::vector<uint64_t>{2}, doubles).message()),
              HasSubstr("expected F64 [2]"));
}

}  // namespace
}  // namespace crumb
