// SPDX-License-Identifier: Apache-2.0
//
// Each refusal: its code, and that its message names the thing, the value, the limit or the remedy.
#include "tests/daemon/store/store_fixture.h"

namespace crumb {
namespace {

class RefusalTest : public StoreFixture {
 protected:
  absl::Status Open(const SessionSpec& spec) { return store_->OpenSession(spec).status(); }
  absl::Status Find(std::span<const uint32_t> tokens, std::string_view key = "") {
    return store_->Lookup(session_, key, tokens, false).status();
  }
  static std::vector<PageIdx> Pages(std::initializer_list<uint32_t> pages) {
    return {pages.begin(), pages.end()};
  }
  absl::Status Commit(PublishId id, const std::vector<WrittenBlock>& written) {
    return store_->CommitPublish(session_, id, written).status();
  }
};

TEST_F(RefusalTest, OptionsOutOfBounds) {
  const auto create = [&](auto change) {
    StoreOptions options;
    change(&options);
    return PageStore::Create(options, clock_).status();
  };
  EXPECT_REFUSED(kInvalidArgument, create([](auto* o) { o->capacity_bytes = 10; }),
                 "capacity_bytes is 10", "4096");
  EXPECT_REFUSED(kInvalidArgument, create([](auto* o) { o->lease = absl::ZeroDuration(); }),
                 "lease is 0", "more than 0");
  EXPECT_REFUSED(kInvalidArgument, create([](auto* o) { o->quarantine = -absl::Seconds(1); }),
                 "quarantine is -1s");
  EXPECT_REFUSED(kInvalidArgument, create([](auto* o) { o->max_sessions = 0; }),
                 "max_sessions is 0");
}

TEST_F(RefusalTest, SessionOutOfBounds) {
  SessionSpec spec = SmallSession();
  spec.client_name.clear();
  EXPECT_REFUSED(kInvalidArgument, Open(spec), "client_name", "0 bytes", "128");
  spec = SmallSession(std::string(129, 'x'));
  EXPECT_REFUSED(kInvalidArgument, Open(spec), "tenant", "129 bytes");
  spec = SmallSession("a/b");
  EXPECT_REFUSED(kInvalidArgument, Open(spec), "tenant", "0x2f", "position 1");
  spec = SmallSession();
  spec.heads = {3, 2};
  EXPECT_REFUSED(kInvalidArgument, Open(spec), "first 3, count 2", "4 KV heads");
  spec.heads = {0xffffffff, 0xffffffff};
  EXPECT_REFUSED(kInvalidArgument, Open(spec), "heads");
  spec = SmallSession();
  spec.profile.geometry.key_dim = 33;
  EXPECT_REFUSED(kInvalidArgument, Open(spec), "geometry", "33", "multiple of 32");
  spec = SmallSession();
  spec.profile.windows.recent_tokens = 100;
  EXPECT_REFUSED(kInvalidArgument, Open(spec), "recent_tokens 100", "64");
}

TEST_F(RefusalTest, SessionsAreBounded) {
  StoreOptions options;
  options.max_sessions = 1;
  Restart(options);
  EXPECT_REFUSED(kResourceExhausted, Open(SmallSession()), "1 are attached", "max_sessions");
  store_->EndSession(session_);
  EXPECT_EQ(absl::OkStatus(), Open(SmallSession()));
}

TEST_F(RefusalTest, PromptOutOfBounds) {
  StoreOptions options;
  options.max_tokens = 1000;
  Restart(options);
  EXPECT_REFUSED(kInvalidArgument, Find({}), "0 tokens", "1 to 1000");
  EXPECT_REFUSED(kInvalidArgument, Find(std::vector<uint32_t>(1001)), "1001 tokens", "1000");
  EXPECT_REFUSED(kInvalidArgument, Find(PagesOf("a"), std::string(257, 'k')), "257 bytes", "256");
  EXPECT_REFUSED(kInvalidArgument, store_->Probe(session_, "", {}).status(), "0 tokens");
  EXPECT_REFUSED(kInvalidArgument, store_->BeginPublish(session_, "", PromptOf("a", 3)).status(),
                 "67 tokens", "multiple of 64");
}

TEST_F(RefusalTest, ProbeOfANamespaceThatIsNotThere) {
  Publish("ab");
  EXPECT_REFUSED(kNotFound, store_->Probe(Namespace("nobody"), PagesOf("a")).status(),
                 "no namespace", Namespace("nobody").Hex(), "there are 1");
  EXPECT_EQ(2u * kPageTokens, store_->Probe(Namespace(), PromptOf("ab", 1))->matched_tokens);
  EXPECT_REFUSED(kNotFound, store_->Tree(Namespace("nobody"), 10).status(), "no namespace");
}

TEST_F(RefusalTest, CommitThatIsNotWhatWasPlanned) {
  const auto plan = store_->BeginPublish(session_, "", PagesOf("abcd"));
  const auto all = Unwritten(plan->missing);  // Bf16(0), Int2(1), Int2(2), Bf16(2), ...
  auto wrong = all;
  wrong.erase(wrong.begin() + 1);
  EXPECT_REFUSED(kInvalidArgument, Commit(plan->id, wrong), "page 1 in INT2 was not written");
  wrong = all;
  wrong.erase(wrong.begin());
  EXPECT_REFUSED(kInvalidArgument, Commit(plan->id, wrong), "page 0 in BF16 was not written");
  wrong = all;
  wrong.insert(wrong.begin(), wrong[0]);
  EXPECT_REFUSED(kInvalidArgument, Commit(plan->id, wrong), "page 0 in BF16", "twice");
  wrong = all;
  std::swap(wrong[1], wrong[2]);
  EXPECT_REFUSED(kInvalidArgument, Commit(plan->id, wrong), "page 1 in INT2", "out of order");
  wrong = all;
  wrong.push_back(Unwritten({Int2(4)})[0]);
  EXPECT_REFUSED(kInvalidArgument, Commit(plan->id, wrong), "page 4 in INT2", "not in the plan");
  wrong = all;
  wrong[2].head_crc32c.pop_back();
  EXPECT_REFUSED(kInvalidArgument, Commit(plan->id, wrong), "page 2 in INT2 has 3 checksums", "4");
  EXPECT_EQ(0u, Matched("abcd"));
  // After all that, the publish still stands.
  EXPECT_EQ(absl::OkStatus(), Commit(plan->id, all));
  EXPECT_REFUSED(kNotFound, Commit(plan->id, all), "no publish", "committed");
}

TEST_F(RefusalTest, CommitWhileSomethingIsWritten) {
  const auto plan = store_->BeginPublish(session_, "", PagesOf("ab"));
  {
    const auto guard = store_->BeginWrite(session_, plan->id, Pages({1}));
    ASSERT_EQ(absl::OkStatus(), guard.status());
    EXPECT_EQ(2u, guard->blocks().size());
    EXPECT_REFUSED(kFailedPrecondition, Commit(plan->id, Unwritten(plan->missing)),
                   "page 1 in INT2", "still being written");
    EXPECT_REFUSED(kFailedPrecondition, store_->BeginWrite(session_, plan->id).status(),
                   "page 1 in INT2", "written already");
  }
  const auto none = store_->BeginWrite(session_, plan->id, Pages({9}));
  ASSERT_EQ(absl::OkStatus(), none.status());
  EXPECT_TRUE(none->blocks().empty()) << "the plan has nothing of page 9";
  EXPECT_EQ(absl::OkStatus(), Commit(plan->id, Unwritten(plan->missing)));
}

TEST_F(RefusalTest, PartsThatWereNotWrittenSo) {
  const auto plan = store_->BeginPublish(session_, "", PagesOf("abcd"));
  const std::vector<WrittenBlock> all = Unwritten(plan->missing);
  const auto keep = [&](std::vector<WrittenBlock> written) {
    return store_->KeepWritten(session_, plan->id, std::move(written));
  };
  EXPECT_REFUSED(kInvalidArgument, keep({all[2], all[1]}), "page 1 in INT2", "out of order");
  EXPECT_REFUSED(kInvalidArgument, keep({all[1], all[1]}), "page 1 in INT2", "twice");
  EXPECT_REFUSED(kInvalidArgument, keep(Unwritten({Int2(1), Int2(4)})), "page 4 in INT2",
                 "not in the plan");
  std::vector<WrittenBlock> wrong = {all[1]};
  wrong[0].head_crc32c.pop_back();
  EXPECT_REFUSED(kInvalidArgument, keep(wrong), "page 1 in INT2 has 3 checksums", "4");
  {
    const auto guard = store_->BeginWrite(session_, plan->id, Pages({1}));
    EXPECT_REFUSED(kFailedPrecondition, keep({all[1]}), "page 1 in INT2", "still being written");
  }
  EXPECT_EQ(absl::OkStatus(), keep({all[1]})) << "nothing of all that was noted";
  EXPECT_REFUSED(kInvalidArgument, keep({all[1]}), "page 1 in INT2", "twice");
  EXPECT_REFUSED(kInvalidArgument, Commit(plan->id, all), "page 1 in INT2", "twice");
  EXPECT_REFUSED(kInvalidArgument, Commit(plan->id, {}), "page 0 in BF16", "was not written");
  std::vector<WrittenBlock> rest = all;
  rest.erase(rest.begin() + 1);
  EXPECT_EQ(absl::OkStatus(), Commit(plan->id, rest));
  EXPECT_REFUSED(kNotFound, keep({all[1]}), "no publish");
}

TEST_F(RefusalTest, PublishOfAnotherSession) {
  const auto plan = store_->BeginPublish(session_, "", PagesOf("ab"));
  const SessionId other = Attach();
  EXPECT_REFUSED(kNotFound, store_->AbortPublish(other, plan->id), "no publish");
  EXPECT_REFUSED(kNotFound, store_->BeginWrite(other, plan->id).status(), "no publish");
  EXPECT_REFUSED(kNotFound,
                 store_->CommitPublish(other, plan->id, Unwritten(plan->missing)).status(),
                 "no publish");
}

TEST_F(RefusalTest, UnfinishedPublishesAreBounded) {
  StoreOptions options;
  options.max_publishes_per_session = 1;
  Restart(options);
  const auto plan = store_->BeginPublish(session_, "", PagesOf("ab"));
  ASSERT_EQ(absl::OkStatus(), plan.status());
  EXPECT_REFUSED(kResourceExhausted, store_->BeginPublish(session_, "", PagesOf("cd")).status(),
                 "1 unfinished publishes", "abort some");
}

TEST_F(RefusalTest, TooManyPublishersOfOnePage) {
  for (int i = 0; i < 4; ++i) {
    ASSERT_EQ(absl::OkStatus(), store_->BeginPublish(Attach(), "", PagesOf("abc")).status());
  }
  const StoreStatus before = store_->Status();
  EXPECT_REFUSED(kAborted, store_->BeginPublish(session_, "", PagesOf("abc")).status(),
                 "page 0 in BF16", "4 others", "retry");
  EXPECT_EQ(before.used_bytes, store_->Status().used_bytes);
  EXPECT_EQ(before.publishes, store_->Status().publishes);
}

TEST_F(RefusalTest, NamespacesAreBounded) {
  StoreOptions options;
  options.max_namespaces = 1;
  Restart(options);
  Publish("ab");
  EXPECT_REFUSED(kResourceExhausted,
                 store_->BeginPublish(session_, "adapter", PagesOf("ab")).status(), "1 have pages",
                 "crumbctl evict");
  ASSERT_TRUE(store_->Evict(Namespace(), {}).ok());
  EXPECT_EQ(absl::OkStatus(), store_->BeginPublish(session_, "adapter", PagesOf("ab")).status());
}

TEST_F(RefusalTest, ReadBeyondTheLease) {
  Publish("abcd");
  const LookupResult found = Lookup("abc", 1, true);
  const auto read = [&](const PageKey& key) {
    return store_->BeginRead(session_, found.lease, {{key}}).status();
  };
  EXPECT_REFUSED(kInvalidArgument, read(Int2(3)), "page 3 in INT2", "pages 0 to 2");
  EXPECT_REFUSED(kInvalidArgument, read(Int2(0)), "page 0 in INT2");  // The sink has none.
  EXPECT_REFUSED(kInvalidArgument, read(Int2(0xffffffff)), "4294967295");
  EXPECT_REFUSED(kFailedPrecondition,
                 store_->BeginRead(Attach(), found.lease, {{Int2(1)}}).status(), "over");
}

TEST_F(RefusalTest, NothingNewWhileDraining) {
  Publish("ab");
  const LookupResult found = Lookup("ab");
  const auto plan = store_->BeginPublish(session_, "", PagesOf("abc"));
  store_->SetDraining();
  EXPECT_REFUSED(kUnavailable, Open(SmallSession()), "draining", "sessions");
  EXPECT_REFUSED(kUnavailable, Find(PagesOf("ab")), "draining", "lookups");
  EXPECT_REFUSED(kUnavailable, store_->BeginPublish(session_, "", PagesOf("x")).status(),
                 "draining", "publishes");
  // What was begun may be finished.
  EXPECT_EQ(absl::OkStatus(), Commit(plan->id, Unwritten(plan->missing)));
  EXPECT_TRUE(store_->BeginRead(session_, found.lease, {{Int2(1)}}).ok());
  EXPECT_EQ(absl::OkStatus(), store_->ReleaseLeases(session_, {{found.lease}}));
  EXPECT_TRUE(store_->Status().draining);
}

}  // namespace
}  // namespace crumb
