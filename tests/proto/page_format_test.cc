// SPDX-License-Identifier: Apache-2.0
//
// Holds the page format still: positions are a bijection, and the bytes of a fixed pattern are
// those that page_format_golden.py packed from the words of the design.
#include "proto/page/page_format.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "proto/base/crc32c.h"
#include "proto/page/chunk_layout.h"
#include "proto/page/geometry.h"

namespace crumb {
namespace {

struct Dims {
  uint32_t key_dim;
  uint32_t value_dim;
};

class PageFormatTest : public testing::TestWithParam<Dims> {
 protected:
  static Int2HeadBlock block() { return {GetParam().key_dim, GetParam().value_dim}; }
};

size_t Bit(CodePosition position) {
  return 8 * position.byte + position.shift;
}

// Each two bits of [begin, end) are taken once, none outside.
template <typename PositionOf>
void ExpectBijection(size_t begin, size_t end, uint32_t dim, PositionOf position_of) {
  std::vector<int> uses(4 * (end - begin));
  for (uint32_t token = 0; token < kPageTokens; ++token) {
    for (uint32_t channel = 0; channel < dim; ++channel) {
      const CodePosition position = position_of(token, channel);
      ASSERT_EQ(position.shift % 2, 0U);
      ASSERT_LT(position.shift, 8U);
      ASSERT_GE(position.byte, begin);
      ASSERT_LT(position.byte, end);
      ++uses[(Bit(position) - 8 * begin) / 2];
    }
  }
  for (const int use : uses) {
    ASSERT_EQ(use, 1);
  }
}

TEST_P(PageFormatTest, EveryCodeHasItsOwnTwoBits) {
  ExpectBijection(block().key_codes_offset(), block().value_codes_offset(), GetParam().key_dim,
                  [](uint32_t token, uint32_t channel) { return block().KeyCode(token, channel); });
  ExpectBijection(
      block().value_codes_offset(), block().key_meta_offset(), GetParam().value_dim,
      [](uint32_t token, uint32_t channel) { return block().ValueCode(token, channel); });
}

TEST_P(PageFormatTest, EveryTokenHasItsOwnMetaAndTheBlockHasNothingElse) {
  std::set<size_t> bytes;
  for (uint32_t token = 0; token < kPageTokens; ++token) {
    bytes.insert(block().KeyMetaByte(token));
    bytes.insert(block().ValueMetaByte(token));
  }
  ASSERT_EQ(bytes.size(), size_t{2} * kPageTokens);
  EXPECT_EQ(*bytes.begin(), block().key_meta_offset());
  EXPECT_EQ(*bytes.rbegin() + 4, block().bytes());
  for (const size_t byte : bytes) {
    EXPECT_EQ(byte % 4, 0U);
  }
  EXPECT_EQ(block().bytes(), kPageTokens * (size_t{GetParam().key_dim} + GetParam().value_dim) / 4 +
                                 size_t{8} * kPageTokens);
}

// What the layout is for: one lane's words of one tile are contiguous by fours, 16 bytes aligned,
// and two codes eight tokens apart are two bits apart in one byte.
TEST_P(PageFormatTest, ALaneReadsSixteenBytesAtATime) {
  for (uint32_t lane = 0; lane < 32; ++lane) {
    for (uint32_t word = 0; word < 8; word += 4) {
      const size_t first = Int2HeadBlock::WordIndex(word, lane);
      EXPECT_EQ(first % 4, 0U);
      for (uint32_t i = 1; i < 4; ++i) {
        EXPECT_EQ(Int2HeadBlock::WordIndex(word + i, lane), first + i);
      }
    }
  }
  EXPECT_EQ(Bit(block().KeyCode(8, 0)), Bit(block().KeyCode(0, 0)) + 2);
  EXPECT_EQ(Bit(block().KeyCode(0, 16)), Bit(block().KeyCode(0, 0)) + 4);
  EXPECT_EQ(Bit(block().ValueCode(0, 8)), Bit(block().ValueCode(0, 0)) + 2);
  EXPECT_EQ(Bit(block().ValueCode(4, 0)), Bit(block().ValueCode(0, 0)) + 4);
}

INSTANTIATE_TEST_SUITE_P(Dims,
                         PageFormatTest,
                         testing::Values(Dims{32, 32},
                                         Dims{64, 64},
                                         Dims{96, 96},
                                         Dims{128, 128},
                                         Dims{256, 256},
                                         Dims{512, 512},
                                         Dims{128, 64},
                                         Dims{64, 256}),
                         [](const auto& instance) {
                           return std::to_string(instance.param.key_dim) + "_" +
                                  std::to_string(instance.param.value_dim);
                         });

struct Golden {
  uint32_t key_dim;
  uint32_t value_dim;
  size_t bytes;
  uint32_t crc32c;
  const char* first_of_keys;    // 16 bytes.
  const char* first_of_values;  // 16 bytes.
};

// Printed by page_format_golden.py.
constexpr Golden kGolden[] = {
    {32, 32, 1536, 0x625bf79b, "80b3a2918059f28fd003077a10fd9b75",
     "d5d1d19d59595915652cdb86e89753ce"},
    {64, 64, 2560, 0xe53f3fa4, "80b3a29180f3e2d58059f28f15f24bd5",
     "d5d1d19d59595915652cdb86e89753ce"},
    {128, 128, 4608, 0xecf966e3, "80b3a29180f3e2d5c4f7e6d504372a19",
     "d5d1d19d59595915652cdb86e89753ce"},
    {256, 256, 8704, 0x8d29b81a, "80b3a29180f3e2d5c4f7e6d504372a19",
     "d5d1d19d59595915652cdb86e89753ce"},
    {128, 64, 3584, 0xe751193d, "80b3a29180f3e2d5c4f7e6d504372a19",
     "d5d1d19d59595915652cdb86e89753ce"},
    {64, 128, 3584, 0x73480de5, "80b3a29180f3e2d58059f28f15f24bd5",
     "d5d1d19d59595915652cdb86e89753ce"},
};

uint32_t KeyPattern(uint32_t token, uint32_t channel) {
  return (token * 5 + channel * 3 + token * channel / 7) % 4;
}

uint32_t ValuePattern(uint32_t token, uint32_t channel) {
  return (token * 3 + channel * 5 + token * channel / 11 + 1) % 4;
}

void PutCode(CodePosition position, uint32_t code, std::vector<std::byte>* block) {
  block->at(position.byte) |= static_cast<std::byte>(code << position.shift);
}

void PutWord(size_t at, uint32_t word, std::vector<std::byte>* block) {
  for (size_t i = 0; i < 4; ++i) {
    block->at(at + i) = static_cast<std::byte>(word >> (8 * i));
  }
}

std::vector<std::byte> PackPattern(const Int2HeadBlock& layout) {
  std::vector<std::byte> block(layout.bytes());
  for (uint32_t token = 0; token < kPageTokens; ++token) {
    for (uint32_t channel = 0; channel < layout.key_dim; ++channel) {
      PutCode(layout.KeyCode(token, channel), KeyPattern(token, channel), &block);
    }
    for (uint32_t channel = 0; channel < layout.value_dim; ++channel) {
      PutCode(layout.ValueCode(token, channel), ValuePattern(token, channel), &block);
    }
    PutWord(layout.KeyMetaByte(token), 0x3c000000 + token, &block);
    PutWord(layout.ValueMetaByte(token), 0xbc000000 + token, &block);
  }
  return block;
}

std::string Hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte byte : bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    text.push_back(kDigits[static_cast<size_t>(byte) >> 4]);
    text.push_back(kDigits[static_cast<size_t>(byte) & 15]);
  }
  return text;
}

TEST(PageFormatGoldenTest, BytesAreThoseOfTheDesign) {
  for (const Golden& golden : kGolden) {
    const Int2HeadBlock layout{golden.key_dim, golden.value_dim};
    const std::vector<std::byte> block = PackPattern(layout);
    SCOPED_TRACE(testing::Message() << golden.key_dim << ", " << golden.value_dim);
    EXPECT_EQ(block.size(), golden.bytes);
    EXPECT_EQ(Hex(std::span(block).first(16)), golden.first_of_keys);
    EXPECT_EQ(Hex(std::span(block).subspan(layout.value_codes_offset(), 16)),
              golden.first_of_values);
    EXPECT_EQ(Crc32c(block), golden.crc32c);
  }
}

TEST(HeadDimTest, AreMultiplesOf32UpTo512) {
  for (uint32_t dim = 0; dim <= 600; ++dim) {
    EXPECT_EQ(IsValidHeadDim(dim), dim != 0 && dim % 32 == 0 && dim <= 512) << dim;
  }
}

TEST(GeometryTest, HeadRangesAreContiguousAndTileTheImage) {
  const Geometry geometry{.num_layers = 3, .num_kv_heads = 5, .key_dim = 64, .value_dim = 128};
  for (const PageEncoding encoding : {PageEncoding::kInt2, PageEncoding::kBf16}) {
    const size_t block = geometry.HeadBlockBytes(encoding);
    size_t expected = 0;
    for (uint32_t head = 0; head < 5; ++head) {
      EXPECT_EQ(geometry.HeadBlockOffset(encoding, 0, head),
                head * geometry.HeadRangeBytes(encoding));
      for (uint32_t layer = 0; layer < 3; ++layer) {
        EXPECT_EQ(geometry.HeadBlockOffset(encoding, layer, head), expected);
        expected += block;
      }
    }
    EXPECT_EQ(geometry.PageBytes(encoding), expected);
  }
  EXPECT_EQ(geometry.HeadBlockBytes(PageEncoding::kBf16), 64U * (64 + 128) * 2);
}

TEST(GeometryTest, LimitsAreInclusive) {
  const Geometry largest{.num_layers = 512, .num_kv_heads = 64, .key_dim = 512, .value_dim = 512};
  EXPECT_TRUE(largest.IsValid());
  const auto is_valid_with = [&](auto change) {
    Geometry geometry = largest;
    change(&geometry);
    return geometry.IsValid();
  };
  EXPECT_FALSE(is_valid_with([](Geometry* g) { g->num_layers = 0; }));
  EXPECT_FALSE(is_valid_with([](Geometry* g) { g->num_layers = 513; }));
  EXPECT_FALSE(is_valid_with([](Geometry* g) { g->num_kv_heads = 0; }));
  EXPECT_FALSE(is_valid_with([](Geometry* g) { g->num_kv_heads = 65; }));
  EXPECT_FALSE(is_valid_with([](Geometry* g) { g->key_dim = 48; }));
  EXPECT_FALSE(is_valid_with([](Geometry* g) { g->value_dim = 544; }));
}

TEST(ChunkLayoutTest, FitsAsManyBlocksAsTheTargetHolds) {
  const Geometry geometry{.num_layers = 2, .num_kv_heads = 3, .key_dim = 64, .value_dim = 64};
  for (const PageEncoding encoding : {PageEncoding::kInt2, PageEncoding::kBf16}) {
    for (size_t target = 0; target < 4'000'000; target += 33'333) {
      const ChunkLayout layout = ChunkLayout::Fit(geometry, encoding, target);
      ASSERT_GE(layout.num_blocks, 1U);
      if (layout.num_blocks > 1) {
        ASSERT_LE(layout.total_bytes(), target);
      }
      const ChunkLayout more{layout.image_bytes, layout.num_blocks + 1};
      // One block more would not fit, but for the rounding of the header table.
      ASSERT_GT(more.total_bytes() + kChunkAlignment, target);
    }
  }
}

TEST(ChunkLayoutTest, BlocksAreAlignedAndApartFromEachOtherAndTheHeaders) {
  const ChunkLayout layout{.image_bytes = 15'360, .num_blocks = 40};
  size_t end = ChunkLayout::header_offset(layout.num_blocks);
  for (uint32_t block = 0; block < layout.num_blocks; ++block) {
    EXPECT_EQ(layout.block_offset(block) % kChunkAlignment, 0U);
    EXPECT_GE(layout.block_offset(block), end);
    end = layout.block_offset(block) + layout.image_bytes;
  }
  EXPECT_GE(layout.total_bytes(), end);
}

}  // namespace
}  // namespace crumb
