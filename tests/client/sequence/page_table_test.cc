// SPDX-License-Identifier: Apache-2.0
#include "client/sequence/page_table.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/client/sequence/sequence_testing.h"
#include "tests/support/test_profile.h"

namespace crumb {
namespace {

using testing::HasSubstr;

constexpr uint32_t kSink = 64;
constexpr uint32_t kRecent = 128;

class PageTableTest : public testing::Test {
 protected:
  PageTable::Shape Shape(bool keep_all_bf16 = false) const {
    return {.geometry = profile_->geometry(),
            .heads = {0, profile_->geometry().num_kv_heads},
            .windows = profile_->windows(),
            .profile_id = profile_->id(),
            .keep_all_bf16 = keep_all_bf16};
  }
  std::vector<std::byte> Image(PageEncoding encoding) const {
    return std::vector<std::byte>(profile_->geometry().PageBytes(encoding));
  }
  // Grows a table token by token, as decoding does.
  static void GrowTo(uint32_t length, PageTable* table) {
    const uint32_t num_pages = (length + kPageTokens - 1) / kPageTokens;
    ASSERT_TRUE(table->Extend(num_pages).ok());
    auto demotions = table->PlanDemotion(length);
    ASSERT_TRUE(demotions.ok());
    table->CommitDemotion(*std::move(demotions));
  }

  std::shared_ptr<const Profile> profile_ =
      MakeTestProfile({.windows = {.sink_tokens = kSink, .recent_tokens = kRecent}});
};

TEST(HistoryEndTest, FirstQueryOfAChunkSeesTheRecentWindowInBf16) {
  for (const uint32_t recent : {0u, 64u, 128u, 256u}) {
    for (uint32_t length = 0; length < 1000; ++length) {
      const uint32_t end = HistoryEnd(length, recent);
      EXPECT_EQ(end % kPageTokens, 0u);
      EXPECT_LE(end, length);
      // The query's own row is at `length`.
      EXPECT_GE(length + 1 - end, std::min(recent, length + 1)) << length << " " << recent;
      // And no more than a page beyond it.
      EXPECT_LT(length + 1 - end, std::max(recent, 1u) + kPageTokens) << length << " " << recent;
    }
  }
}

TEST(HistoryEndTest, MovesByWholePagesWhenTheWindowHasPassedThem) {
  EXPECT_EQ(HistoryEnd(255 + 63, 256), 0u);
  EXPECT_EQ(HistoryEnd(255 + 64, 256), 64u);
  EXPECT_EQ(HistoryEnd(255 + 127, 256), 64u);
  EXPECT_EQ(HistoryEnd(255 + 128, 256), 128u);
}

TEST_F(PageTableTest, EveryPositionIsInExactlyOneRegion) {
  PageTable table(Shape());
  PageTable::Regions regions;
  for (uint32_t length = 1; length < kSink + 4 * kRecent; ++length) {
    GrowTo(length, &table);
    table.CollectRegions(length, 1, 1, &regions);
    uint64_t tokens = regions.history.size() * kPageTokens;
    for (const Bf16Rows& rows : regions.windows) {
      tokens += rows.num_tokens;
    }
    ASSERT_EQ(tokens, length);
    for (uint32_t page = 0; page < table.num_pages(); ++page) {
      const bool history =
          page * kPageTokens >= kSink && (page + 1) * kPageTokens <= HistoryEnd(length, kRecent);
      ASSERT_EQ(table.in_history(PageIdx(page)), history) << "page " << page << " at " << length;
      ASSERT_EQ(table.Block(PageIdx(page), PageEncoding::kInt2, 0, 0) != nullptr, history);
      ASSERT_EQ(table.Block(PageIdx(page), PageEncoding::kBf16, 0, 0) != nullptr, !history);
    }
  }
}

TEST_F(PageTableTest, TruncatingGivesTheMemoryBack) {
  PageTable table(Shape());
  GrowTo(200, &table);
  const size_t before = table.footprint().own_bf16_bytes;
  ASSERT_TRUE(table.Extend(40).ok());
  EXPECT_GT(table.footprint().own_bf16_bytes, before);
  table.Truncate(4);
  EXPECT_EQ(table.footprint().own_bf16_bytes, before);
}

TEST_F(PageTableTest, RetainedTailOutlivesItsPagesWindow) {
  PageTable table(Shape());
  ASSERT_TRUE(table.Retain(4, 6).ok());
  GrowTo(64 * 20, &table);
  for (uint32_t page = 0; page < 20; ++page) {
    const bool window = !table.in_history(PageIdx(page));
    EXPECT_EQ(table.Block(PageIdx(page), PageEncoding::kBf16, 0, 0) != nullptr,
              window || page == 4 || page == 5)
        << page;
  }
  table.ReleaseRetained();
  EXPECT_EQ(table.Block(PageIdx(4), PageEncoding::kBf16, 0, 0), nullptr);
  EXPECT_NE(table.Block(PageIdx(0), PageEncoding::kBf16, 0, 0), nullptr) << "the sink stays";
}

TEST_F(PageTableTest, RetainingRowsThatAreGoneIsRefused) {
  PageTable table(Shape());
  GrowTo(64 * 20, &table);
  const absl::Status status = table.Retain(4, 6);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("page 4 (tokens 256 to 319)"));
  EXPECT_TRUE(table.Retain(18, 24).ok()) << "rows that are there, or still to come";
}

TEST_F(PageTableTest, AdoptedPagesAreReadWhereTheWindowsWantThem) {
  auto prefix = std::make_shared<FakePrefix>(profile_, 8);
  for (uint32_t page = 0; page < 8; ++page) {
    if (page > 0) {
      prefix->Put(PageIdx(page), PageEncoding::kInt2, Image(PageEncoding::kInt2));
    }
    if (page == 0 || page == 3 || page == 7) {  // The sink, another's tail, and one of the window.
      prefix->Put(PageIdx(page), PageEncoding::kBf16, Image(PageEncoding::kBf16));
    }
  }
  PageTable table(Shape());
  ASSERT_TRUE(table.Adopt(prefix).ok());
  for (uint32_t page = 0; page < 8; ++page) {
    EXPECT_EQ(table.in_history(PageIdx(page)), page != 0 && page != 7) << page;
  }
  const Sequence::Footprint footprint = table.footprint();
  EXPECT_EQ(footprint.own_int2_bytes + footprint.own_bf16_bytes, 0u);
  EXPECT_EQ(footprint.shared_bf16_bytes, 2 * Image(PageEncoding::kBf16).size());
  EXPECT_EQ(footprint.shared_int2_bytes, 6 * Image(PageEncoding::kInt2).size());
}

TEST_F(PageTableTest, SharedPageLeavesTheWindowForTheSharedInt2Block) {
  auto prefix = std::make_shared<FakePrefix>(profile_, 4);
  for (uint32_t page = 0; page < 4; ++page) {
    prefix->Put(PageIdx(page), PageEncoding::kBf16, Image(PageEncoding::kBf16));
    if (page != 3) {
      prefix->Put(PageIdx(page), PageEncoding::kInt2, Image(PageEncoding::kInt2));
    }
  }
  PageTable table(Shape());
  ASSERT_TRUE(table.Adopt(prefix).ok());
  ASSERT_TRUE(table.Extend(8).ok());
  auto demotions = table.PlanDemotion(64 * 8);
  ASSERT_TRUE(demotions.ok());
  for (const PageTable::Demotion& demotion : *demotions) {
    // Own memory only where the prefix has no INT2 of the page.
    EXPECT_EQ(static_cast<bool>(demotion.int2), demotion.page.value() >= 3);
  }
  table.CommitDemotion(*std::move(demotions));
  EXPECT_EQ(table.Block(PageIdx(2), PageEncoding::kInt2, 1, 1),
            prefix->HeadBlock(PageIdx(2), PageEncoding::kInt2, 1, 1));
}

TEST_F(PageTableTest, PrefixThatLacksWhatAPageNeedsIsRefusedAndNothingIsAdopted) {
  auto prefix = std::make_shared<FakePrefix>(profile_, 3);
  for (uint32_t page = 0; page < 3; ++page) {
    prefix->Put(PageIdx(page), PageEncoding::kInt2, Image(PageEncoding::kInt2));
  }
  PageTable table(Shape());
  absl::Status status = table.Adopt(prefix);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("page 0 (tokens 0 to 63)"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("the sink needs"));
  EXPECT_EQ(table.num_pages(), 0u);

  prefix->Put(PageIdx(0), PageEncoding::kBf16, Image(PageEncoding::kBf16));
  prefix->Drop(PageIdx(2), PageEncoding::kInt2);
  status = table.Adopt(prefix);
  EXPECT_THAT(std::string(status.message()), HasSubstr("page 2 (tokens 128 to 191)"));
  prefix->Put(PageIdx(2), PageEncoding::kBf16, Image(PageEncoding::kBf16));
  EXPECT_TRUE(table.Adopt(prefix).ok());
}

TEST_F(PageTableTest, PrefixOfAnotherProfileIsRefusedByName) {
  const auto other = MakeTestProfile({.seed = 99});
  PageTable table(Shape());
  const absl::Status status = table.Adopt(std::make_shared<FakePrefix>(other, 1));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr(other->id().Short()));
  EXPECT_THAT(std::string(status.message()), HasSubstr(profile_->id().Short()));
}

TEST_F(PageTableTest, KeepingAllInBf16DemotesNothing) {
  PageTable table(Shape(/*keep_all_bf16=*/true));
  GrowTo(64 * 20, &table);
  EXPECT_EQ(table.footprint().own_int2_bytes, 0u);
  EXPECT_FALSE(table.in_history(PageIdx(5)));
}

}  // namespace
}  // namespace crumb
