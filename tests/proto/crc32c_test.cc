// SPDX-License-Identifier: Apache-2.0
#include "proto/base/crc32c.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/crc32c_paths.h"

namespace crumb {
namespace {

std::vector<std::byte> Bytes(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) {
    byte = static_cast<std::byte>(random());
  }
  return bytes;
}

std::span<const std::byte> Text(std::string_view text) {
  return std::as_bytes(std::span(text));
}

struct Path {
  const char* name;
  bool (*is_here)();
  uint32_t (*checksum)(std::span<const std::byte>, uint32_t);
};

class Crc32cPathTest : public ::testing::TestWithParam<Path> {
 protected:
  void SetUp() override {
    if (!GetParam().is_here()) {
      GTEST_SKIP() << "this processor has no instructions for " << GetParam().name;
    }
  }
  static uint32_t Checksum(std::span<const std::byte> bytes, uint32_t seed = 0) {
    return GetParam().checksum(bytes, seed);
  }
};

INSTANTIATE_TEST_SUITE_P(All,
                         Crc32cPathTest,
                         ::testing::Values(Path{"Dispatched", [] { return true; }, Crc32c},
                                           Path{"Table", [] { return true; }, Crc32cByTable},
                                           Path{"Streams", HasCrc32cStreams, Crc32cByStreams},
                                           Path{"Folding", HasCrc32cFolding, Crc32cByFolding}),
                         [](const auto& path) { return std::string(path.param.name); });

// RFC 3720, appendix B.4.
TEST_P(Crc32cPathTest, VectorsOfTheRfc) {
  std::vector<std::byte> bytes(32);
  EXPECT_EQ(Checksum(bytes), 0x8a9136aaU);
  std::fill(bytes.begin(), bytes.end(), std::byte{0xff});
  EXPECT_EQ(Checksum(bytes), 0x62a8ab43U);
  for (size_t i = 0; i < 32; ++i) {
    bytes[i] = static_cast<std::byte>(i);
  }
  EXPECT_EQ(Checksum(bytes), 0x46dd794eU);
  std::reverse(bytes.begin(), bytes.end());
  EXPECT_EQ(Checksum(bytes), 0x113fdb5cU);
  const uint8_t read_command[48] = {0x01, 0xc0, 0, 0, 0, 0, 0, 0, 0,    0, 0, 0,    0, 0, 0, 0,
                                    0x14, 0,    0, 0, 0, 0, 4, 0, 0,    0, 0, 0x14, 0, 0, 0, 0x18,
                                    0x28, 0,    0, 0, 0, 0, 0, 0, 0x02, 0, 0, 0,    0, 0, 0, 0};
  EXPECT_EQ(Checksum(std::as_bytes(std::span(read_command))), 0xd9963a56U);
  EXPECT_EQ(Checksum(Text("123456789")), 0xe3069283U);
  EXPECT_EQ(Checksum({}), 0U);
}

// A bit at a time, as the definition has it.
uint32_t ByDefinition(std::span<const std::byte> bytes, uint32_t seed) {
  uint32_t state = ~seed;
  for (const std::byte byte : bytes) {
    state ^= static_cast<uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) {
      state = (state >> 1) ^ ((state & 1) != 0 ? 0x82f63b78U : 0U);
    }
  }
  return ~state;
}

TEST_P(Crc32cPathTest, AgreesWithTheDefinitionAtEveryLengthAndAlignment) {
  // Past two rounds of the three streams.
  const auto bytes = Bytes(3 * 1024 * 2 + 200, 1);
  for (size_t begin = 0; begin < 9; ++begin) {
    for (size_t size = 0; size < 600; ++size) {
      const auto piece = std::span(bytes).subspan(begin, size);
      ASSERT_EQ(Checksum(piece), ByDefinition(piece, 0)) << begin << ", " << size;
    }
  }
  std::mt19937 random(2);
  for (int round = 0; round < 2000; ++round) {
    const size_t begin = random() % 64;
    const size_t size = random() % (bytes.size() - begin);
    const auto seed = static_cast<uint32_t>(random());
    const auto piece = std::span(bytes).subspan(begin, size);
    ASSERT_EQ(Checksum(piece, seed), ByDefinition(piece, seed)) << begin << ", " << size;
  }
}

TEST_P(Crc32cPathTest, ContinuesWhereItStopped) {
  const auto bytes = Bytes(10'000, 3);
  const uint32_t whole = Checksum(bytes);
  for (const size_t cut : {0U, 1U, 7U, 8U, 256U, 3071U, 3072U, 3073U, 9'999U, 10'000U}) {
    const auto first = std::span(bytes).first(cut);
    const auto second = std::span(bytes).subspan(cut);
    EXPECT_EQ(Checksum(second, Checksum(first)), whole) << cut;
    EXPECT_EQ(Crc32cByTable(second, Checksum(first)), whole) << cut;
  }
}

TEST_P(Crc32cPathTest, EveryFlippedBitChangesIt) {
  auto bytes = Bytes(300, 4);
  const uint32_t before = Checksum(bytes);
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    ASSERT_NE(Checksum(bytes), before) << bit;
    bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
  }
}

TEST(Crc32cTest, CopyingCopiesAndChecks) {
  for (const size_t size : {0U, 1U, 100U, 12'287U, 12'288U, 12'289U, 100'000U}) {
    const auto source = Bytes(size, 5);
    std::vector<std::byte> target(size + 2, std::byte{0x5a});
    EXPECT_EQ(CopyWithCrc32c(source, std::span(target).subspan(1, size)), Crc32cByTable(source));
    EXPECT_TRUE(std::equal(source.begin(), source.end(), target.begin() + 1));
    EXPECT_EQ(target.front(), std::byte{0x5a});
    EXPECT_EQ(target.back(), std::byte{0x5a});
  }
}

TEST(Crc32cTest, ChecksumsOfTwoPartsJoinToThatOfBoth) {
  const std::vector<std::byte> bytes = Bytes(200000, 3);
  for (const size_t size : {size_t{0}, size_t{1}, size_t{4608}, size_t{163328}, bytes.size()}) {
    for (const size_t first : {size_t{0}, size_t{1}, size / 3, size}) {
      if (first > size) {
        continue;
      }
      const std::span<const std::byte> whole = std::span(bytes).first(size);
      const std::span<const std::byte> second = whole.subspan(first);
      EXPECT_EQ(Crc32cJoin(second.size())(Crc32c(whole.first(first)), Crc32c(second)),
                Crc32c(whole))
          << first << " of " << size << " bytes";
    }
  }
}

}  // namespace
}  // namespace crumb
