// SPDX-License-Identifier: Apache-2.0
//
// Copies in the tier beside the host arena, on a fake device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/daemon/store/copies_fixture.h"

namespace crumb {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST_F(CopiesTest, PublishedPagesAreCopiedAndFoundThereByThoseWhoReadCopies) {
  Publish("abcd");
  EXPECT_EQ(1u, store_->Status().waiting_promotions);
  EXPECT_EQ(6u, CopyEverything());  // Three in INT2; the sink and the tail of two in BF16.
  const LookupResult found = Lookup("abcd", 64);
  ASSERT_EQ(4u, found.pages.size());
  EXPECT_THAT(CopiedPages(found), ElementsAre(1, 2, 3));
  ExpectCopyHolds(*found.pages[0].bf16_copy, Bf16(0), "abcd");
  ExpectCopyHolds(*found.pages[2].int2_copy, Int2(2), "abcd");
  ExpectCopyHolds(*found.pages[3].bf16_copy, Bf16(3), "abcd");
  EXPECT_EQ(0u, store_->Status().waiting_promotions) << "all was there";
  EXPECT_EQ(6u, store_->Status().counters.copies);

  const SessionId on_host = Attach();
  const auto same = store_->Lookup(on_host, "", PromptOf("abcd", 64), false);
  ASSERT_EQ(absl::OkStatus(), same.status());
  EXPECT_THAT(CopiedPages(*same), IsEmpty());
}

TEST_F(CopiesTest, ChunksOfCopiesAreListedToTheirTenant) {
  Publish("abcd");
  CopyEverything();
  const auto listed = store_->ListChunks(session_, /*of_copies=*/true, ChunkId(), 10);
  ASSERT_EQ(absl::OkStatus(), listed.status());
  ASSERT_GE(listed->size(), 2u);
  EXPECT_LT((*listed)[1].id, (*listed)[0].id);
  for (const ChunkName& chunk : *listed) {
    EXPECT_EQ(absl::OkStatus(), store_->GetCopyChunk(session_, chunk.id).status());
  }
  EXPECT_THAT(*store_->ListChunks(session_, true, ChunkId(), 1), ElementsAre((*listed)[0]));
  EXPECT_THAT(*store_->ListChunks(session_, true, (*listed)[0].id, 1), ElementsAre((*listed)[1]));
  EXPECT_THAT(*store_->ListChunks(AttachReader("other"), true, ChunkId(), 10), IsEmpty());
  EXPECT_FALSE(store_->ListChunks(SessionId(99), true, ChunkId(), 10).ok());
}

TEST_F(CopiesTest, LookupHasMissingCopiesMade) {
  Publish("abcd");
  tier_->flips_a_bit = true;
  EXPECT_EQ(0u, CopyEverything());
  EXPECT_EQ(6u, store_->Status().counters.failed_copies);
  EXPECT_EQ(0u, store_->Status().copies);
  tier_->flips_a_bit = false;
  EXPECT_THAT(CopiedPages(Lookup("abcd", 64)), IsEmpty());
  EXPECT_EQ(6u, CopyEverything());
  EXPECT_THAT(CopiedPages(Lookup("abcd", 64)), ElementsAre(1, 2, 3));
}

TEST_F(CopiesTest, SessionsWithoutCopiesHaveNoneMadeByTheirLookups) {
  Publish("abcd");
  tier_->flips_a_bit = true;
  CopyEverything();
  session_ = Attach();
  Lookup("abcd");
  EXPECT_EQ(0u, store_->Status().waiting_promotions);
}

TEST_F(CopiesTest, ColdLeavesGoFirstAndWhatALeaseHasStays) {
  RestartWith(5);  // Two for BF16, three for the 27 blocks of INT2.
  Publish("abcdefghijklmnop");
  CopyEverything();
  const LookupResult held = Lookup("abcd", 64 * 4);
  EXPECT_THAT(CopiedPages(held), ElementsAre(1, 2, 3));
  clock_.Advance(absl::Seconds(1));
  Publish("aBCDEFGHIJKLMNOPQRSTUVWX");  // 23 blocks of INT2: 12 are free.
  CopyEverything();
  // The cold prefix's tail in BF16, whose segment INT2 pages then take, and its last pages.
  EXPECT_GT(store_->Status().counters.dropped_copies, 2u);
  for (const uint32_t page : {1u, 2u, 3u}) {
    ExpectCopyHolds(*held.pages[page].int2_copy, Int2(page), "abcdefghijklmnop");
  }
  // What is left of the cold prefix is its first pages, without a hole.
  const LookupResult cold = Lookup("abcdefghijklmnop", 64 * 4);
  const std::vector<uint32_t> left = CopiedPages(cold);
  ASSERT_FALSE(left.empty());
  for (uint32_t i = 0; i < left.size(); ++i) {
    EXPECT_EQ(i + 1, left[i]);
  }
  EXPECT_LT(left.size(), 15u);
  EXPECT_EQ(16u, Matched("abcdefghijklmnop")) << "a page whose copy was dropped stays";
}

TEST_F(CopiesTest, DroppedCopyComesBackWithItsBytes) {
  RestartWith(3);
  Publish("abcdefgh");
  CopyEverything();
  clock_.Advance(absl::Seconds(1));
  Publish("zyxwvutsrqponm");
  CopyEverything();
  EXPECT_GT(store_->Status().counters.dropped_copies, 0u);
  clock_.Advance(absl::Seconds(1));
  Release(Lookup("abcdefgh", 64 * 4));
  CopyEverything();
  const LookupResult found = Lookup("abcdefgh", 64 * 4);
  EXPECT_THAT(CopiedPages(found), ElementsAre(1, 2, 3, 4, 5, 6, 7));
  for (uint32_t page = 1; page < 8; ++page) {
    ExpectCopyHolds(*found.pages[page].int2_copy, Int2(page), "abcdefgh");
  }
}

TEST_F(CopiesTest, TierFullOfLeasedPagesTakesNoMoreAndHarmsNothing) {
  RestartWith(3);
  Publish("abcdefgh");
  CopyEverything();
  const LookupResult held = Lookup("abcdefgh", 64 * 4);
  clock_.Advance(absl::Seconds(1));
  Publish("ABCDEFGHIJKLMNOP");
  CopyEverything();
  EXPECT_GT(store_->Status().counters.unplaced_copies, 0u);
  EXPECT_EQ(0u, store_->Status().waiting_promotions);
  EXPECT_EQ(16u, Matched("ABCDEFGHIJKLMNOP"));
  for (uint32_t page = 1; page < 8; ++page) {
    ExpectCopyHolds(*held.pages[page].int2_copy, Int2(page), "abcdefgh");
  }
}

TEST_F(CopiesTest, CopyGoesWithItsPageAndItsGenerationMoves) {
  Publish("abcd");
  CopyEverything();
  const LookupResult found = Lookup("abcd", 64);
  const BlockRef ref = *found.pages[3].int2_copy;
  const auto chunk = store_->GetCopyChunk(session_, ref.chunk);
  ASSERT_EQ(absl::OkStatus(), chunk.status());
  Release(found);
  ASSERT_EQ(absl::OkStatus(), store_->Evict(Namespace(), {}).status());
  EXPECT_EQ(0u, store_->Status().copies);
  PageHeader header;
  ASSERT_EQ(static_cast<ssize_t>(sizeof(header)),
            ::pread(chunk->headers.get(), &header, sizeof(header),
                    static_cast<off_t>(ChunkLayout::header_offset(ref.block))));
  EXPECT_EQ(1u, header.generation % 2);
  EXPECT_REFUSED(kNotFound, store_->GetCopyChunk(session_, ref.chunk).status(), "look the prefix");
}

TEST_F(CopiesTest, SegmentChangesItsTenantOnlyAfterItWasRenewed) {
  RestartWith(3);
  Publish("abcd");
  CopyEverything();
  const LookupResult found = Lookup("abcd", 64);
  auto old = store_->GetCopyChunk(session_, found.pages[1].int2_copy->chunk);
  ASSERT_EQ(absl::OkStatus(), old.status());
  Release(found);
  ASSERT_EQ(absl::OkStatus(), store_->Evict(Namespace(), {}).status());

  session_ = AttachReader("other");
  tier_->out_of_memory = true;
  Publish("ABCD");
  EXPECT_EQ(0u, CopyEverything()) << "no segment is ready, and none is used as it is";
  EXPECT_THAT(store_->TakeSpentSegments(), IsEmpty()) << "each is told once";
  tier_->out_of_memory = false;
  for (const uint32_t segment : {0u, 1u, 2u}) {
    ASSERT_EQ(absl::OkStatus(), tier_->Renew(segment));
    store_->ReturnSegment(segment);
  }
  Release(Lookup("ABCD", 64));
  EXPECT_EQ(6u, CopyEverything());
  // Who mapped the old memory sees what it saw.
  std::vector<std::byte> image(kGeometry.PageBytes(PageEncoding::kInt2));
  const off_t offset = static_cast<off_t>(found.pages[1].int2_copy->block *
                                          ChunkLayout{image.size(), 1}.block_stride());
  ASSERT_EQ(static_cast<ssize_t>(image.size()),
            ::pread(old->memory.get(), image.data(), image.size(), offset));
  const std::vector<uint32_t> prefix = PagesOf("ab");
  EXPECT_TRUE(HeadHolds(HeadSignature("", prefix, PageEncoding::kInt2, 0),
                        std::span(image).first(kGeometry.HeadRangeBytes(PageEncoding::kInt2))));
}

TEST_F(CopiesTest, ChunkOfCopiesIsRefusedToOtherTenantsAndProfiles) {
  Publish("abcd");
  CopyEverything();
  const ChunkId chunk = Lookup("abcd", 64).pages[1].int2_copy->chunk;
  EXPECT_REFUSED(kPermissionDenied, store_->GetCopyChunk(AttachReader("other"), chunk).status(),
                 "tenant other");
  EXPECT_REFUSED(kNotFound, store_->GetCopyChunk(session_, ChunkId(99)).status(), "99");
  Restart({});
  EXPECT_REFUSED(kFailedPrecondition, store_->GetCopyChunk(session_, chunk).status(), "gpu_arena");
}

TEST_F(CopiesTest, RanksThatPublishTheirHeadsLaterAddThemToTheCopy) {
  const SessionId low = Attach("default", {0, 2});
  const SessionId high = Attach("default", {2, 2});
  const auto publish = [&](SessionId session, HeadRange heads) {
    ASSERT_EQ(absl::OkStatus(),
              PublishAll(store_.get(), session, "", PagesOf("abcd"), heads).status());
  };
  publish(low, {0, 2});
  CopyEverything();
  const SessionId low_reader = AttachReader("default", {0, 2});
  const auto before = store_->Lookup(low_reader, "", PromptOf("abcd", 64), false);
  ASSERT_EQ(absl::OkStatus(), before.status());
  EXPECT_THAT(CopiedPages(*before), ElementsAre(1, 2, 3));
  publish(high, {2, 2});
  CopyEverything();
  const LookupResult all = Lookup("abcd", 64);
  EXPECT_THAT(CopiedPages(all), ElementsAre(1, 2, 3));
  EXPECT_EQ(before->pages[2].int2_copy, all.pages[2].int2_copy) << "nothing read has moved";
  ExpectCopyHolds(*all.pages[2].int2_copy, Int2(2), "abcd");
}

TEST_F(CopiesTest, GeometryThatTheTierCannotUseIsLeftAlone) {
  tier_->refused_key_dim = kGeometry.key_dim;
  Publish("abcd");
  EXPECT_EQ(0u, store_->Status().waiting_promotions);
  Lookup("abcd");
  EXPECT_EQ(0u, store_->Status().waiting_promotions);
}

TEST_F(CopiesTest, WhatIsBeingCopiedIsHeldUntilTheBatchEnds) {
  Publish("abcd");
  {
    CopyBatch batch = store_->BeginCopies(size_t{1} << 30);
    EXPECT_EQ(6u, batch.copies().size());
    const auto evicted = store_->Evict(Namespace(), {});
    ASSERT_EQ(absl::OkStatus(), evicted.status());
    EXPECT_EQ(0u, evicted->evicted_pages);
    EXPECT_EQ(absl::OkStatus(), store_->CheckInvariants());
    const auto results = tier_->Write(batch.copies());
    for (size_t i = 0; i < results.size(); i += 2) {
      batch.SetArrived(i);
    }
  }
  EXPECT_EQ(3u, store_->Status().copies);
  EXPECT_EQ(4u, store_->Evict(Namespace(), {})->evicted_pages);
  EXPECT_EQ(0u, store_->Status().copies);
}

TEST_F(CopiesTest, WaitingForWorkEndsWhenToldTo) {
  Publish("abcd");
  EXPECT_TRUE(store_->AwaitCopyWork());
  store_->StopCopies();
  EXPECT_FALSE(store_->AwaitCopyWork());
  EXPECT_TRUE(store_->BeginCopies(1).copies().empty());
}

}  // namespace
}  // namespace crumb
