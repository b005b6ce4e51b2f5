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

TEST(PullPlanTest, LayersFollowOneAnotherWithoutGaps) {
  const PullPlan plan(kGeometry, kMixed);
  size_t expected = kMixed.size() * sizeof(PageHeader);
  for (uint32_t layer = 0; layer < kGeometry.num_layers; ++layer) {
    EXPECT_EQ(plan.LayerBegin(layer), expected);
    for (uint32_t entry = 0; entry < plan.num_entries(); ++entry) {
      for (uint32_t head = 0; head < kGeometry.num_kv_heads; ++head) {
        EXPECT_EQ(plan.BlockOffset(layer, entry, head), expected);
        EXPECT_EQ(expected % 512, 0u);
        expected += kGeometry.HeadBlockBytes(kMixed[entry]);
      }
    }
    EXPECT_EQ(plan.LayerEnd(layer), expected);
  }
  EXPECT_EQ(plan.total_bytes(), expected);
}

TEST(PullPlanTest, GatheredInPiecesOfAnySizeTheBlocksAreTheImages) {
  const Pages pages(kMixed);
  const PullPlan plan(kGeometry, kMixed);
  for (const size_t piece : {size_t{1}, size_t{511}, size_t{4096}, size_t{100000000}}) {
    std::vector<std::byte> stream(plan.total_bytes());
    for (size_t offset = 0; offset < stream.size(); offset += piece) {
      const size_t bytes = std::min(piece, stream.size() - offset);
      plan.Gather(pages.sources, offset, std::span(stream).subspan(offset, bytes));
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
