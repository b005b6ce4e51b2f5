// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/pull_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

namespace crumb {
namespace {

constexpr Geometry kGeometry{.num_layers = 3, .num_kv_heads = 4, .key_dim = 32, .value_dim = 64};

// Images of random bytes, with their headers.
struct Pages {
  explicit Pages(std::vector<PageEncoding> of) : encodings(std::move(of)) {
    std::mt19937_64 random(1);
    headers.resize(encodings.size());
    for (size_t entry = 0; entry < encodings.size(); ++entry) {
      headers[entry].generation = random();
      std::vector<std::byte>& image = images.emplace_back(kGeometry.PageBytes(encodings[entry]));
      std::generate(image.begin(), image.end(), [&] { return static_cast<std::byte>(random()); });
      sources.push_back({&headers[entry], image.data()});
    }
  }

  std::vector<PageEncoding> encodings;
  std::vector<PageHeader> headers;
  std::vector<std::vector<std::byte>> images;
  std::vector<PullPlan::Source> sources;
};

const std::vector<PageEncoding> kMixed = {PageEncoding::kBf16, PageEncoding::kInt2,
                                          PageEncoding::kInt2, PageEncoding::kBf16};

TEST(PullPlanTest, OrderedLayersFollowOneAnotherWithoutGapsAndImagesAfterThem) {
  for (uint32_t ordered = 1; ordered <= kGeometry.num_layers; ++ordered) {
    const PullPlan plan(kGeometry, kMixed, {ordered, 5000});
    size_t expected = kMixed.size() * sizeof(PageHeader);
    EXPECT_EQ(plan.headers_bytes(), expected);
    for (uint32_t layer = 0; layer < ordered; ++layer) {
      for (uint32_t entry = 0; entry < plan.num_entries(); ++entry) {
        for (uint32_t head = 0; head < kGeometry.num_kv_heads; ++head) {
          EXPECT_EQ(plan.BlockOffset(layer, entry, head), expected);
          EXPECT_EQ(expected % 512, 0u);
          expected += kGeometry.HeadBlockBytes(kMixed[entry]);
        }
      }
      EXPECT_EQ(plan.BytesUntil(layer),
                layer + 1 < kGeometry.num_layers || ordered < 3 ? expected : plan.total_bytes());
    }
    for (uint32_t entry = 0; ordered < kGeometry.num_layers && entry < plan.num_entries();
         ++entry) {
      EXPECT_EQ(plan.BlockOffset(ordered, entry, 1),
                expected + kGeometry.HeadBlockOffset(kMixed[entry], ordered, 1));
      EXPECT_EQ(plan.BytesUntil(ordered), plan.total_bytes());
      expected += kGeometry.PageBytes(kMixed[entry]);
    }
    EXPECT_EQ(plan.total_bytes(), expected);
  }
}

TEST(PullPlanTest, PiecesOfAnySizeCoverTheStreamOnce) {
  for (const uint32_t chunk : {1u, 3u, 511u, 4096u, 10000u, 100000000u}) {
    const PullPlan plan(kGeometry, kMixed, {1, chunk});
    size_t offset = 0;
    for (size_t number = 0; number < plan.num_pieces(); ++number) {
      const PullPlan::Piece piece = plan.PieceAt(number);
      ASSERT_EQ(piece.offset, offset);
      ASSERT_GT(piece.bytes, 0u);
      ASSERT_LE(piece.bytes, size_t{chunk} + (chunk + 1) / 2);
      ASSERT_EQ(plan.PieceOf(offset), number);
      ASSERT_EQ(plan.PieceOf(offset + piece.bytes - 1), number);
      offset += piece.bytes;
    }
    EXPECT_EQ(offset, plan.total_bytes());
  }
}

TEST(PullPlanTest, AMessageIsAGatheredPieceOrImagesThatFollowEachOther) {
  const PullPlan plan(kGeometry, kMixed, {1, 4096});
  for (size_t begin = 0; begin < plan.num_pieces(); ++begin) {
    const PullPlan::Piece first = plan.PieceAt(begin);
    size_t bytes = 0;
    for (size_t end = begin + 1; end <= plan.num_pieces(); ++end) {
      bytes += plan.PieceAt(end - 1).bytes;
      const bool is_message = end == begin + 1 || begin >= plan.num_gathered_pieces();
      const PullPlan::Pieces pieces = plan.PiecesIn(first.offset, bytes);
      ASSERT_EQ(pieces.begin, is_message ? begin : 0) << end;
      ASSERT_EQ(pieces.end, is_message ? end : 0) << begin;
      for (const PullPlan::Pieces none :
           {plan.PiecesIn(first.offset, bytes - 1), plan.PiecesIn(first.offset, bytes + 1),
            plan.PiecesIn(first.offset + 1, bytes - 1)}) {
        ASSERT_EQ(none.begin, none.end) << begin << " to " << end;
      }
    }
  }
  for (const PullPlan::Pieces none :
       {plan.PiecesIn(0, 0), plan.PiecesIn(plan.total_bytes(), 1), plan.PiecesIn(SIZE_MAX, 2),
        plan.PiecesIn(plan.PieceAt(plan.num_pieces() - 1).offset, SIZE_MAX)}) {
    EXPECT_EQ(none.begin, none.end);
  }
}

TEST(PullPlanTest, ReceivedInPiecesOfAnySizeTheBlocksAreTheImages) {
  const Pages pages(kMixed);
  for (const PullPlan::Cut cut :
       {PullPlan::Cut{3, 1}, {3, 511}, {1, 4096}, {2, 777}, {2, 100000000}}) {
    const PullPlan plan(kGeometry, kMixed, cut);
    std::vector<std::byte> stream(plan.total_bytes());
    for (size_t number = 0; number < plan.num_pieces(); ++number) {
      const PullPlan::Piece piece = plan.PieceAt(number);
      const auto target = std::span(stream).subspan(piece.offset, piece.bytes);
      if (piece.entry == PullPlan::kGathered) {
        plan.Gather(pages.sources, piece.offset, target);
      } else {
        std::copy_n(&pages.images[piece.entry][piece.image_offset], piece.bytes, target.data());
      }
    }
    for (uint32_t entry = 0; entry < plan.num_entries(); ++entry) {
      EXPECT_EQ(std::memcmp(&stream[PullPlan::HeaderOffset(entry)], &pages.headers[entry],
                            sizeof(PageHeader)),
                0);
      for (uint32_t layer = 0; layer < kGeometry.num_layers; ++layer) {
        for (uint32_t head = 0; head < kGeometry.num_kv_heads; ++head) {
          const std::byte* source =
              &pages.images[entry][kGeometry.HeadBlockOffset(kMixed[entry], layer, head)];
          EXPECT_EQ(std::memcmp(&stream[plan.BlockOffset(layer, entry, head)], source,
                                plan.block_bytes(entry)),
                    0)
              << "entry " << entry << " layer " << layer << " head " << head;
        }
      }
    }
  }
}

}  // namespace
}  // namespace crumb
