// SPDX-License-Identifier: Apache-2.0
//
// Who goes when there is no room, who stays, and what is said when nobody can go.
#include <string>
#include <utility>

#include "tests/daemon/store/store_fixture.h"

namespace crumb {
namespace {

using EvictionTest = StoreFixture;

// A prefix of four pages takes three blocks of INT2 and three of BF16 (sink and tail).

TEST_F(EvictionTest, ColdestPrefixGoesFirst) {
  RestartWithRoomFor({{3, 3}, {3, 3}, {3, 3}});
  Publish("abcd");
  Publish("efgh");
  Publish("ijkl");
  Release(Lookup("abcd"));
  Publish("mnop");
  EXPECT_EQ(4u, Matched("abcd"));
  EXPECT_LT(Matched("efgh"), 4u);
  EXPECT_EQ(4u, Matched("ijkl"));
  EXPECT_EQ(4u, Matched("mnop"));
}

// Memory that was touched once costs nothing to write again; new memory costs page faults.
TEST_F(EvictionTest, ChunksThatThePublishItselfEmptiesAreUsedAgain) {
  RestartWithRoomFor({{3, 3}});
  Publish("abcd");
  const LookupResult before = Lookup("abcd");
  Release(before);
  clock_.Advance(absl::Minutes(10));  // Its lease's quarantine.
  store_->Tick();
  Publish("efgh");
  EXPECT_EQ(0u, Matched("abcd"));
  const LookupResult after = Lookup("efgh");
  ASSERT_EQ(4u, after.pages.size());
  EXPECT_EQ(before.pages[1].int2->chunk, after.pages[1].int2->chunk);
  EXPECT_NE(before.pages[1].int2->generation, after.pages[1].int2->generation);
  Release(after);
  clock_.Advance(absl::Minutes(10));
  store_->Tick();
  // Never for another namespace: what it once mapped shows what is written there.
  ASSERT_EQ(absl::OkStatus(),
            PublishAll(store_.get(), Attach("other"), "", PagesOf("ijkl")).status());
  EXPECT_EQ(0u, Matched("efgh"));
  const SessionId other = Attach("other");
  const auto found = store_->Lookup(other, "", PromptOf("ijkl", 1), false);
  ASSERT_EQ(absl::OkStatus(), found.status());
  ASSERT_EQ(4u, found->pages.size());
  EXPECT_NE(after.pages[1].int2->chunk, found->pages[1].int2->chunk);
}

TEST_F(EvictionTest, ProbeKeepsNothingWarm) {
  RestartWithRoomFor({{3, 3}, {3, 3}, {3, 3}});
  Publish("abcd");
  Publish("efgh");
  Publish("ijkl");
  EXPECT_EQ(4u, Matched("abcd"));
  Publish("mnop");
  EXPECT_LT(Matched("abcd"), 4u);
}

TEST_F(EvictionTest, PrefixGoesFromItsEnd) {
  RestartWithRoomFor({{12, 3}, {1, 1}});
  Publish("abcdefghijklm");  // 12 INT2, 3 BF16.
  const StoreStatus before = store_->Status();
  Publish("nopq");
  EXPECT_GT(store_->Status().counters.evicted_pages, 0u);
  const uint32_t left = Matched("abcdefghijklm");
  EXPECT_GT(left, 0u);
  EXPECT_EQ(13u - left, store_->Status().counters.evicted_pages);
  EXPECT_LE(store_->Status().chunk_bytes, before.capacity_bytes);
}

TEST_F(EvictionTest, OldTailGoesBeforePagesThatAreUsed) {
  RestartWithRoomFor({{3, 3}, {4, 2}, {3, 1}});
  Publish("abcd");      // BF16: a, c, d.
  Publish("abcdefgh");  // And g, h: the first tail is cold from here on.
  clock_.Advance(absl::Seconds(1));
  Release(Lookup("abcdefgh"));
  Publish("ijkl");  // Three more.
  EXPECT_EQ(8u, Matched("abcdefgh"));
  EXPECT_EQ(0u, store_->Status().counters.evicted_pages);
  EXPECT_GT(store_->Status().counters.evicted_tail_copies, 0u);
  EXPECT_EQ(8u * kPageTokens, Lookup("abcdefgh").length.usable_tokens);
  // Without its tail the short prefix is usable as far as the window allows.
  EXPECT_LT(Lookup("abcd").length.usable_tokens, 4u * kPageTokens);
}

TEST_F(EvictionTest, LeasedTailCopyStays) {
  RestartWithRoomFor({{3, 3}, {4, 2}});
  Publish("abcd");
  const LookupResult found = Lookup("abcd");
  Publish("abcdefgh");
  EXPECT_REFUSED(kResourceExhausted, TryPublish("ijklmnop").status(), "[store] capacity");
  const auto read = store_->BeginRead(session_, found.lease, {{Bf16(2), Bf16(3)}});
  ASSERT_EQ(absl::OkStatus(), read.status());
  EXPECT_TRUE(BlockHolds(read->pages()[0], "", PagesOf("abcd"), kAllHeads, kGeometry));
}

TEST_F(EvictionTest, RefusesWithTheNumbersAndEvictsNothing) {
  RestartWithRoomFor({{3, 3}, {3, 3}});
  Publish("abcd");
  Publish("efgh");
  Lookup("abcd");
  const StoreStatus before = store_->Status();
  // Evicting "efgh" alone would not make room for this.
  EXPECT_REFUSED(kResourceExhausted, TryPublish("ijklmnop").status(), "7 blocks", "3 of",
                 "[store] capacity is ", "4 pages are held by 1 leases", "0 of them in quarantine",
                 "Raise [store] capacity");
  const StoreStatus after = store_->Status();
  EXPECT_EQ(before.used_bytes, after.used_bytes);
  EXPECT_EQ(0u, after.counters.evicted_pages);
  EXPECT_EQ(0u, after.counters.evicted_tail_copies);
  EXPECT_EQ(1u, after.counters.publishes_refused);
  EXPECT_EQ(4u, Matched("efgh"));
  EXPECT_EQ(0u, after.publishes);
}

TEST_F(EvictionTest, RefusesWhatIsLargerThanTheWholeStore) {
  RestartWithRoomFor({{2, 2}});
  EXPECT_REFUSED(kResourceExhausted, TryPublish("abcdefgh").status(), "7 blocks");
  EXPECT_EQ(0u, store_->Status().chunk_bytes);
}

TEST_F(EvictionTest, StoreOfOnePageServesOnePage) {
  RestartWithRoomFor({{0, 1}});
  Publish("a");
  EXPECT_EQ(1u, Matched("a"));
  Publish("b");
  EXPECT_EQ(0u, Matched("a"));
  EXPECT_EQ(1u, Matched("b"));
  EXPECT_REFUSED(kResourceExhausted, TryPublish("ab").status(), "1 blocks");
  EXPECT_EQ(1u, Matched("b"));
}

TEST_F(EvictionTest, UnfinishedPublishIsNeverEvicted) {
  RestartWithRoomFor({{3, 3}});
  const auto plan = store_->BeginPublish(session_, "", PagesOf("abcd"));
  ASSERT_EQ(absl::OkStatus(), plan.status());
  EXPECT_REFUSED(kResourceExhausted, TryPublish("efgh").status(), "1 unfinished publishes");
  ASSERT_EQ(absl::OkStatus(),
            store_->CommitPublish(session_, plan->id, Unwritten(plan->missing)).status());
  Publish("efgh");
  EXPECT_EQ(4u, Matched("efgh"));
}

TEST_F(EvictionTest, SpacePassesToAnotherTenantByWholeChunks) {
  RestartWithRoomFor({{3, 3}, {3, 3}});
  Publish("abcd");
  const ChunkId chunk = Lookup("abcd").pages[1].int2->chunk;
  Publish("efgh");
  store_->EndSession(session_);
  clock_.Advance(absl::Minutes(2));
  session_ = Attach("other");
  Publish("abcd");
  Publish("efgh");
  EXPECT_EQ(4u, Matched("abcd"));
  EXPECT_EQ(4u, Matched("efgh"));
  for (const char* letters : {"abcd", "efgh"}) {
    for (const PageRef& page : Lookup(letters).pages) {
      EXPECT_NE(chunk, page.bf16.value_or(*page.int2).chunk);
    }
  }
  EXPECT_EQ(1u, store_->Status().namespaces.size());
}

// The coldest page of all lies in a chunk that another tenant's lease keeps: evicting it would give
// no one room.
TEST_F(EvictionTest, SparesWhatWouldNotHelp) {
  RestartWithRoomFor({{2, 1}, {1, 1}});
  const auto attach = [&](std::string tenant) {
    SessionSpec spec = SmallSession(std::move(tenant));
    spec.profile = SmallPageProfile(3);
    spec.profile.windows.recent_tokens = 0;  // No tails.
    return *store_->OpenSession(spec);
  };
  const SessionId cold = attach("cold");
  ASSERT_EQ(absl::OkStatus(), PublishAll(store_.get(), cold, "", PagesOf("xyz")).status());
  ASSERT_EQ(2u, store_->Lookup(cold, "", PromptOf("xy", 1), false)->pages.size());
  session_ = attach("busy");
  Publish("ab");
  Publish("cd");
  EXPECT_EQ(2u, Matched("cd"));
  EXPECT_EQ(0u, Matched("ab"));
  EXPECT_EQ(3u, MatchedBy(cold, "xyz"));
  EXPECT_EQ(2u, store_->Status().counters.evicted_pages);
}

TEST_F(EvictionTest, OperatorEvictsAPrefixAndWhatExtendsIt) {
  Publish("abcd");
  Publish("abcxy");
  Publish("amn");
  const auto result = store_->Evict(Namespace(), PagesOf("abc"));
  ASSERT_EQ(absl::OkStatus(), result.status());
  EXPECT_EQ(5u, result->evicted_pages);  // c, d, x, y, and b: nobody else needs it.
  EXPECT_EQ(1u, Matched("abcd"));
  EXPECT_EQ(3u, Matched("amn"));
  EXPECT_EQ(0u, store_->Evict(Namespace(), PagesOf("zz"))->evicted_pages);
  // Longer than what is there: its pages as far as nobody else needs them, here all three.
  EXPECT_EQ(3u, store_->Evict(Namespace(), PagesOf("amnop"))->evicted_pages);
}

TEST_F(EvictionTest, OperatorsEvictionRefusesWhatItCannotFind) {
  Publish("ab");
  EXPECT_REFUSED(kNotFound, store_->Evict(Namespace("nobody"), {}).status(), "no namespace",
                 "there are 1");
  EXPECT_REFUSED(kInvalidArgument, store_->Evict(Namespace(), PromptOf("a", 3)).status(),
                 "67 tokens", "multiple of 64");
}

}  // namespace
}  // namespace crumb
