// SPDX-License-Identifier: Apache-2.0
//
// Lookups and publishes when all goes well: what is found, by whom, and its bytes.
#include "daemon/store/page_store.h"

#include <thread>

#include "tests/daemon/store/store_fixture.h"

namespace crumb {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using PageStoreTest = StoreFixture;

TEST_F(PageStoreTest, FindsWhatWasPublishedWithItsBytes) {
  Publish("abcd");
  const LookupResult found = Lookup("abcd", 5);
  EXPECT_EQ(256u, found.length.matched_tokens);
  EXPECT_EQ(256u, found.length.usable_tokens);
  EXPECT_EQ(0u, found.length.trimmed_tokens);
  ASSERT_EQ(4u, found.pages.size());
  EXPECT_FALSE(found.pages[0].int2.has_value());  // The sink.
  EXPECT_TRUE(found.pages[0].bf16.has_value());
  EXPECT_TRUE(found.pages[1].int2.has_value());
  EXPECT_FALSE(found.pages[1].bf16.has_value());
  EXPECT_TRUE(found.pages[2].int2.has_value());  // The recent window: two pages before token 261.
  EXPECT_TRUE(found.pages[2].bf16.has_value());
  EXPECT_TRUE(found.pages[3].bf16.has_value());

  const std::vector<PageKey> keys = {Bf16(0), Int2(1), Bf16(3)};
  const auto read = store_->BeginRead(session_, found.lease, keys);
  ASSERT_EQ(absl::OkStatus(), read.status());
  ASSERT_EQ(3u, read->pages().size());
  for (const PinnedPage& page : read->pages()) {
    EXPECT_TRUE(BlockHolds(page, "", PagesOf("abcd"), kAllHeads, kGeometry));
  }
  EXPECT_EQ(found.pages[1].int2->generation.value(), read->pages()[1].header.generation);
}

TEST_F(PageStoreTest, MissIsNoErrorAndHasNoLease) {
  Publish("ab");
  const LookupResult found = Lookup("xy");
  EXPECT_EQ(0u, found.length.matched_tokens);
  EXPECT_EQ(LeaseId(), found.lease);
  EXPECT_THAT(found.pages, IsEmpty());
  EXPECT_EQ(0u, store_->Status().leases);
}

TEST_F(PageStoreTest, WantsTheSinkInBf16AndTheTailInBoth) {
  const auto plan = store_->BeginPublish(session_, "", PagesOf("abcd"));
  ASSERT_EQ(absl::OkStatus(), plan.status());
  EXPECT_THAT(plan->missing, ElementsAre(Bf16(0), Int2(1), Int2(2), Bf16(2), Int2(3), Bf16(3)));
}

TEST_F(PageStoreTest, LongerPublishLacksOnlyWhatIsNew) {
  Publish("abcd");
  const auto plan = store_->BeginPublish(session_, "", PagesOf("abcdef"));
  ASSERT_EQ(absl::OkStatus(), plan.status());
  EXPECT_THAT(plan->missing, ElementsAre(Int2(4), Bf16(4), Int2(5), Bf16(5)));
}

TEST_F(PageStoreTest, PartsAreWrittenOneAfterAnotherAndBecomeVisibleTogether) {
  const auto tokens = PagesOf("abcd");
  const auto plan = store_->BeginPublish(session_, "", tokens);
  ASSERT_EQ(absl::OkStatus(), plan.status());
  const auto write = [&](std::initializer_list<uint32_t> numbers, auto expected) {
    std::vector<PageIdx> pages;
    for (const uint32_t number : numbers) {
      pages.emplace_back(number);
    }
    const auto guard = store_->BeginWrite(session_, plan->id, pages);
    EXPECT_EQ(absl::OkStatus(), guard.status());
    std::vector<PageKey> keys;
    std::vector<WrittenBlock> written;
    for (const WritableBlock& block : guard->blocks()) {
      keys.push_back(block.key);
      written.push_back(WriteBlock(block, "", tokens, kAllHeads, kGeometry));
    }
    EXPECT_THAT(keys, expected);
    return written;
  };
  ASSERT_EQ(absl::OkStatus(),
            store_->KeepWritten(session_, plan->id,
                                write({0, 3}, ElementsAre(Bf16(0), Int2(3), Bf16(3)))));
  ASSERT_EQ(absl::OkStatus(),
            store_->KeepWritten(session_, plan->id, write({1}, ElementsAre(Int2(1)))));
  EXPECT_EQ(0u, Matched("abcd"));
  EXPECT_EQ(absl::OkStatus(), store_->CheckInvariants());
  const auto result =
      store_->CommitPublish(session_, plan->id, write({}, ElementsAre(Int2(2), Bf16(2))));
  ASSERT_EQ(absl::OkStatus(), result.status());
  EXPECT_EQ(4u, result->pages_added);
  EXPECT_EQ(4u, Matched("abcd"));
  const LookupResult found = Lookup("abcd", 5);
  const std::vector<PageKey> keys = {Bf16(0), Int2(1), Int2(2), Bf16(2), Int2(3), Bf16(3)};
  const auto read = store_->BeginRead(session_, found.lease, keys);
  ASSERT_EQ(absl::OkStatus(), read.status());
  for (const PinnedPage& page : read->pages()) {
    EXPECT_TRUE(BlockHolds(page, "", tokens, kAllHeads, kGeometry));
  }
}

TEST_F(PageStoreTest, NothingIsVisibleBeforeCommitAndAllIsAfterIt) {
  const auto tokens = PagesOf("abcd");
  const auto plan = store_->BeginPublish(session_, "", tokens);
  ASSERT_EQ(absl::OkStatus(), plan.status());
  std::vector<WrittenBlock> written;
  {
    const auto guard = store_->BeginWrite(session_, plan->id);
    for (const WritableBlock& block : guard->blocks()) {
      written.push_back(WriteBlock(block, "", tokens, kAllHeads, kGeometry));
      EXPECT_EQ(0u, Matched("abcd"));
    }
  }
  EXPECT_EQ(0u, Matched("abcd"));
  EXPECT_EQ(0u, store_->Status().namespaces[0].pages);
  const auto result = store_->CommitPublish(session_, plan->id, written);
  ASSERT_EQ(absl::OkStatus(), result.status());
  EXPECT_EQ(4u, result->pages_added);
  EXPECT_EQ(4u, Matched("abcd"));
}

TEST_F(PageStoreTest, AbortLeavesNothing) {
  const auto plan = store_->BeginPublish(session_, "", PagesOf("abcd"));
  ASSERT_EQ(absl::OkStatus(), store_->AbortPublish(session_, plan->id));
  const StoreStatus status = store_->Status();
  EXPECT_EQ(0u, status.used_bytes);
  EXPECT_EQ(0u, status.chunk_bytes);
  EXPECT_EQ(0u, status.index_nodes);
  EXPECT_THAT(status.namespaces, IsEmpty());
  EXPECT_REFUSED(kNotFound, store_->AbortPublish(session_, plan->id), "aborted");
}

TEST_F(PageStoreTest, TailMayBeLeftOutAndCostsTheNextLookupItsWindow) {
  const auto tokens = PagesOf("abcdef");
  const auto plan = store_->BeginPublish(session_, "", tokens);
  std::vector<PageKey> keys = plan->missing;
  std::erase(keys, Bf16(4));
  std::erase(keys, Bf16(5));
  ASSERT_EQ(absl::OkStatus(), store_->CommitPublish(session_, plan->id, Unwritten(keys)).status());
  const LookupResult found = Lookup("abcdef");
  EXPECT_EQ(6u * kPageTokens, found.length.matched_tokens);
  EXPECT_EQ(4u * kPageTokens, found.length.usable_tokens);
  EXPECT_EQ(2u * kPageTokens, found.length.trimmed_tokens);
  EXPECT_EQ(6u * kPageTokens, Lookup("abcdef", 1, true).length.usable_tokens);
  // A longer suffix puts the window beyond the match.
  EXPECT_EQ(6u * kPageTokens, Lookup("abcdef", 2 * kPageTokens).length.usable_tokens);
}

TEST_F(PageStoreTest, OneTokenIsAlwaysLeftToCompute) {
  Publish("abcd");
  EXPECT_EQ(3u * kPageTokens, Lookup("abcd", 0).length.usable_tokens);
}

TEST_F(PageStoreTest, TwoPublishersOfOnePrefixBothSucceed) {
  const SessionId other = Attach();
  const auto tokens = PagesOf("abcd");
  const auto first = store_->BeginPublish(session_, "", tokens);
  const auto second = store_->BeginPublish(other, "", tokens);
  ASSERT_EQ(absl::OkStatus(), second.status());
  EXPECT_EQ(first->missing, second->missing);
  // The second is first to commit, and visible; the first then finds everything there.
  const auto result = store_->CommitPublish(other, second->id, Unwritten(second->missing));
  EXPECT_EQ(4u, result->pages_added);
  EXPECT_EQ(4u, Matched("abcd"));
  const auto late = store_->CommitPublish(session_, first->id, Unwritten(first->missing));
  ASSERT_EQ(absl::OkStatus(), late.status());
  EXPECT_EQ(0u, late->pages_added);
  EXPECT_EQ(4u, late->pages_present);
  // One copy is kept.
  EXPECT_EQ(3u, store_->Status().int2_pages);
  EXPECT_EQ(0u, store_->Status().unfinished_bytes);
  EXPECT_EQ(store_->Status().used_bytes, store_->Status().namespaces[0].used_bytes);
}

TEST_F(PageStoreTest, RanksFillTheSamePagesEachWithItsHeads) {
  const SessionId low = Attach("default", {0, 2});
  const SessionId high = Attach("default", {2, 2});
  const auto tokens = PagesOf("abc");
  ASSERT_EQ(absl::OkStatus(), PublishAll(store_.get(), low, "", tokens, {0, 2}).status());
  const uint64_t used = store_->Status().used_bytes;
  EXPECT_EQ(3u, MatchedBy(low, "abc"));
  EXPECT_EQ(0u, MatchedBy(high, "abc"));
  EXPECT_EQ(0u, Matched("abc"));
  const auto result = PublishAll(store_.get(), high, "", tokens, {2, 2});
  ASSERT_EQ(absl::OkStatus(), result.status());
  EXPECT_EQ(3u, result->pages_added);
  EXPECT_EQ(3u, MatchedBy(high, "abc"));
  EXPECT_EQ(3u, Matched("abc"));  // By a rank that holds all heads.
  EXPECT_EQ(used, store_->Status().used_bytes);
  // Bytes of a half, as its session sees them.
  const auto found = store_->Lookup(high, "", PromptOf("abc", 1), false);
  const auto read = store_->BeginRead(high, found->lease, {{Int2(1)}});
  EXPECT_EQ(kGeometry.HeadRangeBytes(PageEncoding::kInt2) * 2, read->pages()[0].bytes.size());
  EXPECT_TRUE(BlockHolds(read->pages()[0], "", tokens, {2, 2}, kGeometry));
  EXPECT_EQ(0b1111u, read->pages()[0].header.heads_present);
}

TEST_F(PageStoreTest, RanksMayPublishAtTheSameTime) {
  const SessionId low = Attach("default", {0, 2});
  const SessionId high = Attach("default", {2, 2});
  const auto tokens = PagesOf("abc");
  const auto first = store_->BeginPublish(low, "", tokens);
  const uint64_t used = store_->Status().used_bytes;
  const auto second = store_->BeginPublish(high, "", tokens);
  EXPECT_EQ(first->missing, second->missing);
  EXPECT_EQ(used, store_->Status().used_bytes);
  ASSERT_EQ(absl::OkStatus(),
            store_->CommitPublish(high, second->id, Unwritten(second->missing, 2)).status());
  EXPECT_EQ(0u, MatchedBy(low, "abc"));
  ASSERT_EQ(absl::OkStatus(),
            store_->CommitPublish(low, first->id, Unwritten(first->missing, 2)).status());
  EXPECT_EQ(3u, Matched("abc"));
}

TEST_F(PageStoreTest, NamespacesShareNothing) {
  const SessionId other = Attach("other");
  Publish("abc");
  EXPECT_EQ(0u, MatchedBy(other, "abc"));
  EXPECT_EQ(0u, store_->Probe(session_, "adapter", PromptOf("abc", 1))->matched_tokens);
  ASSERT_EQ(absl::OkStatus(), PublishAll(store_.get(), other, "", PagesOf("abc")).status());
  const auto mine = Lookup("abc");
  const auto theirs = store_->Lookup(other, "", PromptOf("abc", 1), false);
  EXPECT_NE(mine.pages[1].int2->chunk, theirs->pages[1].int2->chunk);
  EXPECT_NE(mine.pages[0].bf16->chunk, theirs->pages[0].bf16->chunk);
}

TEST_F(PageStoreTest, ChunkGoesToItsTenantOnly) {
  Publish("abc");
  const auto found = Lookup("abc");
  const auto chunk = store_->GetChunk(session_, found.pages[1].int2->chunk);
  ASSERT_EQ(absl::OkStatus(), chunk.status());
  EXPECT_TRUE(chunk->fd.is_valid());
  EXPECT_GT(chunk->num_blocks, 0u);
  EXPECT_REFUSED(kPermissionDenied,
                 store_->GetChunk(Attach("other"), found.pages[1].int2->chunk).status(), "other");
  SessionSpec spec = SmallSession();
  spec.profile = SmallPageProfile(2);
  EXPECT_REFUSED(kPermissionDenied,
                 store_->GetChunk(*store_->OpenSession(spec), found.pages[1].int2->chunk).status(),
                 "0202");
  EXPECT_REFUSED(kNotFound, store_->GetChunk(session_, ChunkId(77)).status(), "77", "look");
}

TEST_F(PageStoreTest, TreeShowsBranchesWithParentsFirst) {
  Publish("abcd");
  Publish("abx");
  Release(Lookup("abx"));
  const auto tree = store_->Tree(Namespace(), 100);
  ASSERT_EQ(absl::OkStatus(), tree.status());
  ASSERT_EQ(3u, tree->nodes.size());
  EXPECT_EQ(0u, tree->nodes[0].parent_id);
  EXPECT_EQ(2u * kPageTokens, tree->nodes[0].num_tokens);
  EXPECT_EQ(1u, tree->nodes[0].hits);
  EXPECT_EQ(16u, tree->nodes[0].head_tokens.size());
  EXPECT_EQ(1u, tree->nodes[1].parent_id);
  EXPECT_EQ(1u, tree->nodes[2].parent_id);
  EXPECT_EQ(3u * kGeometry.PageBytes(PageEncoding::kBf16),  // Sink, and a tail of either branch.
            tree->nodes[0].bf16_bytes + kGeometry.PageBytes(PageEncoding::kBf16));
  EXPECT_TRUE(store_->Tree(std::nullopt, 2)->truncated);
}

TEST_F(PageStoreTest, CountsWhatItDid) {
  Publish("abcd");
  Release(Lookup("abcd", 5));
  Lookup("xy");
  const StoreStatus status = store_->Status();
  EXPECT_EQ(2u, status.counters.lookups);
  EXPECT_EQ(261u + 129u, status.counters.lookup_tokens);
  EXPECT_EQ(256u, status.counters.hit_tokens);
  EXPECT_EQ(256u, status.counters.usable_tokens);
  EXPECT_EQ(4u, status.counters.published_pages);
  EXPECT_EQ(1u, status.counters.leases_granted);
  EXPECT_EQ(3u, status.int2_pages);
  EXPECT_EQ(3u, status.bf16_pages);
  ASSERT_EQ(1u, status.namespaces.size());
  EXPECT_EQ(4u, status.namespaces[0].pages);
  EXPECT_EQ(4 * kGeometry.PageBytes(PageEncoding::kBf16),
            status.namespaces[0].bf16_equivalent_bytes);
  ASSERT_EQ(1u, status.sessions.size());
  EXPECT_EQ("test", status.sessions[0].client_name);
}

TEST_F(PageStoreTest, ServesManyThreadsAtOnce) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      const HeadRange heads = t % 2 == 0 ? HeadRange{0, 2} : HeadRange{2, 2};
      const SessionId session = Attach("default", heads);
      for (int i = 0; i < 200; ++i) {
        const std::string letters = {'a', static_cast<char>('a' + i % 3),
                                     static_cast<char>('a' + i % 7)};
        const auto published = PublishAll(store_.get(), session, "", PagesOf(letters), heads);
        ASSERT_TRUE(published.ok() || absl::IsAborted(published.status())) << published.status();
        const auto found = store_->Lookup(session, "", PromptOf(letters, 1), false);
        ASSERT_EQ(absl::OkStatus(), found.status());
        if (!found->pages.empty() && found->pages.back().int2.has_value()) {
          const auto last = static_cast<uint32_t>(found->pages.size() - 1);
          const auto read = store_->BeginRead(session, found->lease, {{Int2(last)}});
          ASSERT_EQ(absl::OkStatus(), read.status());
          EXPECT_TRUE(BlockHolds(read->pages()[0], "", PagesOf(letters), heads, kGeometry));
        }
        ASSERT_EQ(absl::OkStatus(), store_->ReleaseLeases(session, {{found->lease}}));
        if (i % 50 == 49) {
          // A namespace that another thread has just emptied is none.
          const absl::Status evicted = store_->Evict(Namespace(), {}).status();
          ASSERT_TRUE(evicted.ok() || absl::IsNotFound(evicted)) << evicted;
        }
      }
      store_->EndSession(session);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace
}  // namespace crumb
