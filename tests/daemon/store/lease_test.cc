// SPDX-License-Identifier: Apache-2.0
//
// Leases, quarantine, guards, and what is left of a session that died.
#include <cstring>
#include <optional>

#include "daemon/store/page_store.h"
#include "tests/daemon/store/store_fixture.h"

namespace crumb {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class LeaseTest : public StoreFixture {
 protected:
  uint64_t EvictAll() { return store_->Evict(Namespace(), {})->evicted_pages; }
};

TEST_F(LeaseTest, LeasedPagesAreNotEvictedAndOthersAre) {
  Publish("abcd");
  Publish("abxy");
  const LookupResult found = Lookup("abcd");
  const auto result = store_->Evict(Namespace(), {});
  EXPECT_EQ(2u, result->evicted_pages);
  EXPECT_EQ(4u, result->held_pages_kept);
  EXPECT_GT(result->freed_bytes, 0u);
  EXPECT_EQ(4u, Matched("abcd"));
  EXPECT_EQ(2u, Matched("abxy"));
  Release(found);
  EXPECT_EQ(4u, EvictAll());
  EXPECT_EQ(0u, store_->Status().chunk_bytes);
}

TEST_F(LeaseTest, LeaseEndsAtItsDeadlineUnlessRenewed) {
  Publish("abc");
  const LookupResult found = Lookup("abc");
  const LeaseId leases[] = {found.lease};
  clock_.Advance(absl::Seconds(25));
  EXPECT_THAT(*store_->RenewLeases(session_, leases), IsEmpty());
  clock_.Advance(absl::Seconds(30));  // Just within lease and grace.
  EXPECT_TRUE(store_->BeginRead(session_, found.lease, {{Int2(1)}}).ok());
  clock_.Advance(absl::Seconds(2));
  EXPECT_REFUSED(kFailedPrecondition,
                 store_->BeginRead(session_, found.lease, {{Int2(1)}}).status(), "over",
                 "look the prefix up again");
  EXPECT_THAT(*store_->RenewLeases(session_, leases), ElementsAre(found.lease));
  EXPECT_EQ(1u, store_->Status().counters.expired_leases);
}

TEST_F(LeaseTest, PagesOfAnExpiredLeaseStayForAQuarantineAndVisible) {
  Publish("abc");
  Lookup("abc");
  clock_.Advance(absl::Seconds(32));
  store_->Tick();
  EXPECT_EQ(0u, store_->Status().leases);
  EXPECT_EQ(1u, store_->Status().quarantined_leases);
  EXPECT_EQ(0u, EvictAll());
  EXPECT_EQ(3u, Matched("abc"));
  clock_.Advance(absl::Seconds(30));
  EXPECT_EQ(3u, EvictAll());
}

TEST_F(LeaseTest, DeadSessionOwnsNothingButItsPagesGoThroughQuarantine) {
  Publish("abc");
  const LookupResult found = Lookup("abc");
  const auto plan = store_->BeginPublish(session_, "", PagesOf("abcdef"));
  ASSERT_EQ(absl::OkStatus(), plan.status());
  store_->EndSession(session_);
  store_->EndSession(session_);  // No error.
  const StoreStatus status = store_->Status();
  EXPECT_THAT(status.sessions, IsEmpty());
  EXPECT_EQ(0u, status.leases);
  EXPECT_EQ(0u, status.publishes);
  EXPECT_EQ(0u, status.unfinished_bytes);
  EXPECT_EQ(0u, EvictAll());
  EXPECT_REFUSED(kFailedPrecondition, store_->Lookup(session_, "", PagesOf("a"), false).status(),
                 "not attached", "attach again");
  EXPECT_REFUSED(kFailedPrecondition, store_->CommitPublish(session_, plan->id, {}).status(),
                 "not attached");
  clock_.Advance(absl::Seconds(30));
  EXPECT_EQ(3u, EvictAll());
  session_ = Attach();
  EXPECT_FALSE(store_->BeginRead(session_, found.lease, {{Int2(1)}}).ok());
}

TEST_F(LeaseTest, ReadGuardKeepsBytesAfterLeaseSessionAndQuarantine) {
  Publish("abc");
  const LookupResult found = Lookup("abc");
  auto read = store_->BeginRead(session_, found.lease, {{Int2(1), Bf16(2)}});
  ASSERT_EQ(absl::OkStatus(), read.status());
  std::optional<ReadGuard> guard = *std::move(read);
  store_->EndSession(session_);
  clock_.Advance(absl::Hours(1));
  store_->Tick();
  EXPECT_EQ(0u, EvictAll());
  session_ = Attach();
  Publish("xyz");
  for (const PinnedPage& page : guard->pages()) {
    EXPECT_TRUE(BlockHolds(page, "", PagesOf("abc"), kAllHeads, kGeometry));
  }
  guard.reset();
  EXPECT_EQ(6u, EvictAll());
}

TEST_F(LeaseTest, WriteGuardKeepsMemoryFromReuseAfterItsSessionDied) {
  const auto plan = store_->BeginPublish(session_, "", PagesOf("abc"));
  auto write = store_->BeginWrite(session_, plan->id);
  ASSERT_EQ(absl::OkStatus(), write.status());
  std::optional<WriteGuard> guard = *std::move(write);
  const uint64_t used = store_->Status().used_bytes;
  store_->EndSession(session_);
  EXPECT_EQ(used, store_->Status().used_bytes);
  // Another engine publishes the same meanwhile; whatever the dead one writes does not reach it.
  session_ = Attach();
  Publish("abc");
  for (const WritableBlock& block : guard->blocks()) {
    std::memset(block.bytes.data(), 0xee, block.bytes.size());
  }
  const LookupResult found = Lookup("abc");
  const auto read = store_->BeginRead(session_, found.lease, {{Int2(1), Int2(2), Bf16(0)}});
  for (const PinnedPage& page : read->pages()) {
    EXPECT_TRUE(BlockHolds(page, "", PagesOf("abc"), kAllHeads, kGeometry));
  }
  guard.reset();
  EXPECT_EQ(used, store_->Status().used_bytes);  // Of the second publish.
  EXPECT_EQ(0u, store_->Status().unfinished_bytes);
}

TEST_F(LeaseTest, MovedGuardHoldsOnce) {
  Publish("abc");
  const LookupResult found = Lookup("abc");
  ReadGuard first = *store_->BeginRead(session_, found.lease, {{Int2(1)}});
  ReadGuard second = std::move(first);
  EXPECT_THAT(first.pages(), IsEmpty());  // NOLINT(bugprone-use-after-move): that is the point.
  EXPECT_EQ(1u, second.pages().size());
  first = std::move(second);
  EXPECT_EQ(1u, first.pages().size());
}

TEST_F(LeaseTest, GenerationTellsAReaderThatItsPageIsGone) {
  Publish("abcde");
  const LookupResult found = Lookup("abcde");
  const BlockRef place = *found.pages[3].int2;
  Lookup("abc", 1, true);  // Keeps the chunk.
  Release(found);
  ASSERT_EQ(2u, store_->Evict(Namespace(), PagesOf("abcd"))->evicted_pages);
  Publish("abcuv");
  const BlockRef other = *Lookup("abcuv").pages[3].int2;
  EXPECT_EQ(place.chunk, other.chunk);
  EXPECT_EQ(place.block, other.block);
  EXPECT_GT(other.generation, place.generation);
}

TEST_F(LeaseTest, PublishHoldsWhatItFoundUntilItEnds) {
  Publish("abcd");
  const auto plan = store_->BeginPublish(session_, "", PagesOf("abcde"));
  EXPECT_EQ(0u, EvictAll());
  ASSERT_EQ(absl::OkStatus(),
            store_->CommitPublish(session_, plan->id, Unwritten(plan->missing)).status());
  EXPECT_EQ(5u, EvictAll());
}

TEST_F(LeaseTest, LeaseCountIsBounded) {
  StoreOptions options;
  options.max_leases_per_session = 1;
  Restart(options);
  Publish("abc");
  const LookupResult found = Lookup("abc");
  EXPECT_REFUSED(kResourceExhausted,
                 store_->Lookup(session_, "", PromptOf("abc", 1), false).status(), "1 leases",
                 "release some");
  Release(found);
  EXPECT_NE(LeaseId(), Lookup("abc").lease);
}

}  // namespace
}  // namespace crumb
