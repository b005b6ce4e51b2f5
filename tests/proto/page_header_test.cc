// SPDX-License-Identifier: Apache-2.0
#include "proto/page/page_header.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "proto/base/crc32c_paths.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;

const Geometry kGeometry{.num_layers = 2, .num_kv_heads = 3, .key_dim = 32, .value_dim = 64};

template <typename Id>
Id IdOf(uint8_t first) {
  Id id;
  for (size_t i = 0; i < id.bytes.size(); ++i) {
    id.bytes[i] = static_cast<uint8_t>(first + i);
  }
  return id;
}

const ProfileId kProfile = IdOf<ProfileId>(0x10);
const NamespaceId kNamespace = IdOf<NamespaceId>(0x80);

PageHeader MakeHeader() {
  PageHeader header;
  header.encoding = PageEncoding::kBf16;
  header.generation = 0x1122334455667788;
  header.first_token = 7 * kPageTokens;
  header.valid_tokens = kPageTokens;
  header.heads_present = 0b111;
  header.profile_id = kProfile.bytes;
  header.namespace_id = kNamespace.bytes;
  header.head_crc32c[0] = 0xa1b2c3d4;
  header.head_crc32c[63] = 0x01020304;
  return header;
}

PageExpectation Expectation() {
  return {.profile_id = kProfile,
          .namespace_id = kNamespace,
          .encoding = PageEncoding::kBf16,
          .generation = Generation(0x1122334455667788),
          .page_idx = PageIdx(7)};
}

// The header as other programs must write it.
TEST(PageHeaderTest, BytesAreGolden) {
  std::vector<uint8_t> expected = {
      0x43, 0x52, 0x4d, 0x42,                          // "CRMB"
      0x01, 0x00,                                      // Version.
      0x02, 0x00,                                      // BF16; reserved.
      0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11,  // Generation.
      0xc0, 0x01, 0x00, 0x00,                          // First token 448.
      0x40, 0x00, 0x00, 0x00,                          // 64 valid tokens.
      0x07, 0,    0,    0,    0,    0,    0,    0,     // Heads 0, 1, 2.
  };
  expected.insert(expected.end(), kProfile.bytes.begin(), kProfile.bytes.end());
  expected.insert(expected.end(), kNamespace.bytes.begin(), kNamespace.bytes.end());
  ASSERT_EQ(expected.size(), 96U);
  expected.resize(512);
  const uint8_t first_crc[] = {0xd4, 0xc3, 0xb2, 0xa1};
  const uint8_t last_crc[] = {0x04, 0x03, 0x02, 0x01};
  std::copy(std::begin(first_crc), std::end(first_crc), expected.begin() + 96);
  std::copy(std::begin(last_crc), std::end(last_crc), expected.begin() + 96 + 63 * 4);

  const PageHeader header = MakeHeader();
  std::vector<uint8_t> actual(sizeof(header));
  std::memcpy(actual.data(), &header, sizeof(header));
  EXPECT_EQ(actual, expected);
}

TEST(PageHeaderTest, TheExpectedHeaderIsBelieved) {
  EXPECT_TRUE(CheckPageHeader(MakeHeader(), Expectation()).ok());
}

TEST(PageHeaderTest, EachMismatchIsNamedWithBothValues) {
  const auto message = [](auto spoil) {
    PageHeader header = MakeHeader();
    spoil(&header);
    const absl::Status status = CheckPageHeader(header, Expectation());
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    return std::string(status.message());
  };
  EXPECT_THAT(message([](PageHeader* h) { h->magic = 0x1234; }),
              AllOf(HasSubstr("magic is 1234"), HasSubstr("424d5243")));
  EXPECT_THAT(message([](PageHeader* h) { h->format_version = 9; }),
              AllOf(HasSubstr("format version is 9"), HasSubstr("expected 1")));
  EXPECT_THAT(message([](PageHeader* h) { h->profile_id[0] = 0xff; }),
              AllOf(HasSubstr("profile is ff11"), HasSubstr("expected 1011")));
  EXPECT_THAT(message([](PageHeader* h) { h->namespace_id[31] ^= 1; }), HasSubstr("namespace is"));
  EXPECT_THAT(message([](PageHeader* h) { h->encoding = PageEncoding::kInt2; }),
              AllOf(HasSubstr("encoding is 1"), HasSubstr("expected 2")));
  EXPECT_THAT(message([](PageHeader* h) { h->generation = 6; }),
              AllOf(HasSubstr("generation is 6"), HasSubstr("1234605616436508552")));
  EXPECT_THAT(message([](PageHeader* h) { h->first_token = 64; }),
              AllOf(HasSubstr("first token is 64"), HasSubstr("expected 448")));
}

class PageImageTest : public testing::TestWithParam<PageEncoding> {
 protected:
  PageImageTest() : image_(kGeometry.PageBytes(GetParam())) {
    std::mt19937 random(1);
    for (std::byte& byte : image_) {
      byte = static_cast<std::byte>(random());
    }
    header_ = MakeHeader();
    header_.encoding = GetParam();
    header_.head_crc32c = HeadChecksums(kGeometry, GetParam(), 0b111, image_);
  }
  std::vector<std::byte> image_;
  PageHeader header_;
};

TEST_P(PageImageTest, EachHeadHasTheChecksumOfItsRange) {
  const size_t range = kGeometry.HeadRangeBytes(GetParam());
  for (size_t head = 0; head < 3; ++head) {
    EXPECT_EQ(header_.head_crc32c[head],
              Crc32cByTable(std::span(image_).subspan(head * range, range)));
  }
  EXPECT_TRUE(VerifyPageImage(kGeometry, header_, 0b111, image_).ok());
}

TEST_P(PageImageTest, AbsentHeadsHaveNone) {
  const auto checksums = HeadChecksums(kGeometry, GetParam(), 0b101, image_);
  EXPECT_EQ(checksums[0], header_.head_crc32c[0]);
  EXPECT_EQ(checksums[1], 0U);
  EXPECT_EQ(checksums[2], header_.head_crc32c[2]);
  for (size_t head = 3; head < checksums.size(); ++head) {
    EXPECT_EQ(checksums[head], 0U);
  }
}

TEST_P(PageImageTest, AFlippedBitIsFoundAndItsHeadNamed) {
  const size_t range = kGeometry.HeadRangeBytes(GetParam());
  for (const size_t byte : {size_t{0}, range - 1, range, 2 * range + range / 2, 3 * range - 1}) {
    for (const int bit : {0, 7}) {
      image_[byte] ^= static_cast<std::byte>(1 << bit);
      const absl::Status status = VerifyPageImage(kGeometry, header_, 0b111, image_);
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("page at token 448"),
                        HasSubstr("KV head " + std::to_string(byte / range))));
      // Another head's reader is not concerned.
      const uint64_t others = 0b111U & ~(1U << (byte / range));
      EXPECT_TRUE(VerifyPageImage(kGeometry, header_, others, image_).ok());
      image_[byte] ^= static_cast<std::byte>(1 << bit);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Encodings,
                         PageImageTest,
                         testing::Values(PageEncoding::kInt2, PageEncoding::kBf16),
                         [](const auto& instance) {
                           return instance.param == PageEncoding::kInt2 ? "Int2" : "Bf16";
                         });

}  // namespace
}  // namespace crumb
