// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/expand.h"

#include <cmath>
#include <tuple>

#include "gtest/gtest.h"

#include "tests/cuda/codec_testing.h"

namespace crumb {
namespace {

struct Rows {
  std::vector<BFloat16> keys;
  std::vector<BFloat16> values;
};

Rows Expand(const HeadParameters& head,
            std::span<const std::byte> block,
            ExpandSpace space,
            CpuPath path) {
  Rows rows{std::vector<BFloat16>(size_t{kPageTokens} * head.key_dim),
            std::vector<BFloat16>(size_t{kPageTokens} * head.value_dim)};
  ExpandHeadBlock(head, block, space, rows.keys, rows.values, path);
  return rows;
}

// Random codes with plausible metadata: scale in [0.5, 1), minimum in (-2, -1].
std::vector<std::byte> RandomBlock(const HeadParameters& head, uint32_t seed) {
  const Int2HeadBlock format{head.key_dim, head.value_dim};
  std::mt19937 random(seed);
  std::vector<std::byte> block(format.bytes());
  for (std::byte& byte : block) {
    byte = static_cast<std::byte>(random());
  }
  for (size_t at = format.key_meta_offset(); at < block.size(); at += 4) {
    block[at + 1] = std::byte{0x38};
    block[at + 3] = std::byte{0xbc};
  }
  return block;
}

using Shape = std::tuple<uint32_t, uint32_t>;
class ExpandTest : public testing::TestWithParam<Shape> {};

TEST_P(ExpandTest, RotatedRowsAreTheTwinsBitForBit) {
  const auto [key_dim, value_dim] = GetParam();
  TestHead head(key_dim, value_dim, CodecId::kOscarInt2);
  const auto block = RandomBlock(head.parameters(), key_dim);
  const Rows expected =
      Expand(head.parameters(), block, ExpandSpace::kRotated, CpuPath::kReference);
  for (const CpuPath path : FastPaths()) {
    const Rows rows = Expand(head.parameters(), block, ExpandSpace::kRotated, path);
    EXPECT_EQ(rows.keys, expected.keys) << CpuPathName(path);
    EXPECT_EQ(rows.values, expected.values) << CpuPathName(path);
  }
}

// The fast paths rotate in float, the twin in double: results may fall on either side of a rounding
// to bfloat16, whose step is 2^-8 of the value.
TEST_P(ExpandTest, ModelRowsAreTheTwinsToOneRounding) {
  const auto [key_dim, value_dim] = GetParam();
  TestHead head(key_dim, value_dim, CodecId::kOscarInt2);
  const auto block = RandomBlock(head.parameters(), key_dim);
  const Rows expected = Expand(head.parameters(), block, ExpandSpace::kModel, CpuPath::kReference);
  const auto expect_near = [](const std::vector<BFloat16>& got, const std::vector<BFloat16>& want) {
    for (size_t i = 0; i < got.size(); ++i) {
      const float x = want[i].ToFloat();
      ASSERT_NEAR(got[i].ToFloat(), x, std::fabs(x) / 128 + 1e-5) << "element " << i;
    }
  };
  for (const CpuPath path : FastPaths()) {
    SCOPED_TRACE(CpuPathName(path));
    const Rows rows = Expand(head.parameters(), block, ExpandSpace::kModel, path);
    expect_near(rows.keys, expected.keys);
    expect_near(rows.values, expected.values);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes,
                         ExpandTest,
                         testing::Values(Shape{32, 32},
                                         Shape{64, 64},
                                         Shape{96, 96},
                                         Shape{128, 128},
                                         Shape{256, 256},
                                         Shape{128, 64},
                                         Shape{64, 160},
                                         Shape{512, 512}));

TEST(ExpandByHandTest, OneCodeOneRow) {
  TestHead head(64, 64, CodecId::kOscarInt2);
  const Int2HeadBlock format{64, 64};
  std::vector<std::byte> block(format.bytes());
  const uint32_t token = 29;
  const CodePosition key = format.KeyCode(token, 33);
  const CodePosition value = format.ValueCode(token, 7);
  block[key.byte] = static_cast<std::byte>(3u << key.shift);
  block[value.byte] = static_cast<std::byte>(2u << value.shift);
  block[format.KeyMetaByte(token) + 1] = std::byte{0x3c};    // Scale 1.
  block[format.KeyMetaByte(token) + 3] = std::byte{0xc0};    // Minimum -2.
  block[format.ValueMetaByte(token) + 1] = std::byte{0x40};  // Scale 2.
  for (const CpuPath path :
       {CpuPath::kReference, CpuPath::kPortable, CpuPath::kAvx2, CpuPath::kAvx512}) {
    if (!CpuPathAvailable(path)) {
      continue;
    }
    const Rows rows = Expand(head.parameters(), block, ExpandSpace::kRotated, path);
    EXPECT_EQ(rows.keys[token * 64 + 33].ToFloat(), 1);
    EXPECT_EQ(rows.keys[token * 64 + 34].ToFloat(), -2);
    EXPECT_EQ(rows.keys[33].ToFloat(), 0);
    EXPECT_EQ(rows.values[token * 64 + 7].ToFloat(), 4);
    EXPECT_EQ(rows.values[token * 64 + 8].ToFloat(), 0);
  }
}

}  // namespace
}  // namespace crumb
