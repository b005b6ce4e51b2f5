// SPDX-License-Identifier: Apache-2.0
//
// The library against a real crumbd, by the memory map.

#include <atomic>
#include <csignal>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "crumb/client.h"
#include "crumb/cuda/device.h"
#include "proto/base/clock.h"
#include "tests/client/e2e/client_fixture.h"
#include "tests/client/e2e/e2e_model.h"
#include "tests/client/e2e/engine_process.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

TEST_F(ClientTest, SecondEngineContinuesTheFirstBitForBitWithoutACopy) {
  StartDaemon();
  const auto first = NewClient();
  const auto original = Prefill(512);
  const auto published = first->Publish(*original, std::span(prompt_).first(512), {});
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_EQ(published->pages_added, 8u);
  EXPECT_EQ(published->tail_pages, 2u);

  const auto second = NewClient();
  const auto prefix = second->Lookup(std::span(prompt_).first(513), {});
  ASSERT_TRUE(prefix.ok()) << prefix.status();
  EXPECT_EQ((*prefix)->usable_tokens(), 512u);
  EXPECT_EQ((*prefix)->trimmed_tokens(), 0u);
  const auto heir = *Sequence::Create({.profile = profile_, .num_query_heads = kE2eQueryHeads});
  ASSERT_TRUE(heir->Adopt(*prefix).ok());
  for (const uint32_t chunk : {1u, 64u, 130u}) {
    std::vector<std::vector<float>> expected;
    std::vector<std::vector<float>> found;
    ASSERT_TRUE(RunChunk(original.get(), activations_, chunk, &expected).ok());
    ASSERT_TRUE(RunChunk(heir.get(), activations_, chunk, &found).ok());
    EXPECT_EQ(found, expected);
  }
  EXPECT_EQ((*prefix)->copied_bytes(), 0u);
  EXPECT_EQ((*prefix)->data_plane(), DataPlane::kMap);
  EXPECT_GT(heir->footprint().shared_int2_bytes, 0u);
}

TEST_F(ClientTest, PagesCanBeCopiedOut) {
  StartDaemon();
  const auto client = NewClient();
  const auto sequence = Prefill(512);
  ASSERT_TRUE(client->Publish(*sequence, std::span(prompt_).first(512), {}).ok());
  const auto prefix = *client->Lookup(prompt_, {});
  for (const PageEncoding encoding : {PageEncoding::kBf16, PageEncoding::kInt2}) {
    const PageIdx page(encoding == PageEncoding::kBf16 ? 0 : 3);
    std::vector<std::byte> expected(profile_->geometry().PageBytes(encoding));
    std::vector<std::byte> found(expected.size());
    ASSERT_TRUE(sequence->ExportPage(page, encoding, expected).ok());
    ASSERT_TRUE(prefix->CopyPage(page, encoding, found).ok());
    EXPECT_EQ(found, expected);
    EXPECT_EQ(prefix->CopyPage(page, encoding, std::span(found).first(9)).code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(prefix->CopyPage(PageIdx(8), encoding, found).code(), absl::StatusCode::kNotFound);
  }
  EXPECT_TRUE(prefix->Validate().ok());
}

TEST_F(ClientTest, PublishingWhatIsThereAlreadySendsNothing) {
  StartDaemon();
  const auto client = NewClient();
  const auto sequence = Prefill(512);
  ASSERT_TRUE(client->Publish(*sequence, std::span(prompt_).first(512), {}).ok());
  const auto again = NewClient()->Publish(*sequence, std::span(prompt_).first(512), {});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->pages_added, 0u);
  EXPECT_EQ(again->pages_present, 8u);
  EXPECT_EQ(again->bytes_sent, 0u);
}

TEST_F(ClientTest, TwoPublishersOfOnePrefixBothSucceed) {
  StartDaemon();
  const auto sequence = Prefill(512);
  const auto one = NewClient();
  const auto two = NewClient();
  absl::StatusOr<PublishResult> first;
  absl::StatusOr<PublishResult> second;
  std::thread thread([&] { first = one->Publish(*sequence, std::span(prompt_).first(512), {}); });
  second = two->Publish(*sequence, std::span(prompt_).first(512), {});
  thread.join();
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_TRUE(second.ok()) << second.status();
  const auto prefix = one->Lookup(prompt_, {});
  ASSERT_TRUE(prefix.ok());
  EXPECT_EQ((*prefix)->matched_tokens(), 512u);
  EXPECT_TRUE((*prefix)->Validate().ok());
}

TEST_F(ClientTest, PrefixWithoutItsTailIsCutBackToKeepTheRecentWindow) {
  StartDaemon();
  const auto client = NewClient();
  const auto sequence = Prefill(512);
  sequence->ReleaseTail();
  ASSERT_TRUE(RunChunk(sequence.get(), activations_, 300).ok());
  ASSERT_TRUE(client->Publish(*sequence, std::span(prompt_).first(512), {}).ok());
  const auto cut = client->Lookup(std::span(prompt_).first(513), {});
  ASSERT_TRUE(cut.ok());
  EXPECT_EQ((*cut)->usable_tokens(), 384u);
  EXPECT_EQ((*cut)->trimmed_tokens(), 128u);
  const auto whole = client->Lookup(std::span(prompt_).first(513), {.allow_int2_window = true});
  ASSERT_TRUE(whole.ok());
  EXPECT_EQ((*whole)->usable_tokens(), 512u);
}

TEST_F(ClientTest, ContextKeysAndOtherPromptsSeeNothing) {
  StartDaemon();
  const auto client = NewClient();
  ASSERT_TRUE(client->Publish(*Prefill(512), std::span(prompt_).first(512), {}).ok());
  EXPECT_EQ((*client->Lookup(prompt_, {.context_key = "lora"}))->num_pages(), 0u);
  EXPECT_EQ((*client->Lookup(E2ePrompt(6, 600), {}))->num_pages(), 0u);
  prompt_[100] ^= 1;
  EXPECT_EQ((*client->Lookup(prompt_, {}))->matched_tokens(), 64u);
}

TEST_F(ClientTest, TokenListsOfEveryBadLength) {
  StartDaemon();
  const auto client = NewClient();
  const auto empty = client->Lookup({}, {});
  ASSERT_TRUE(empty.ok());
  EXPECT_EQ((*empty)->num_pages(), 0u);
  EXPECT_TRUE((*empty)->Validate().ok());
  const std::vector<uint32_t> many(10'000'000);
  const absl::Status status = client->Lookup(many, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("10000000 tokens; at most 1048576"));
  EXPECT_TRUE(client->Lookup(std::span(many).first(1 << 20), {}).ok());
  const auto sequence = Prefill(200);
  EXPECT_THAT(std::string(client->Publish(*sequence, many, {}).status().message()),
              HasSubstr("10000000 tokens; at most 1048576"));
  for (const size_t count : {size_t{0}, size_t{63}, size_t{65}, size_t{256}}) {
    EXPECT_EQ(client->Publish(*sequence, std::span(prompt_).first(count), {}).status().code(),
              absl::StatusCode::kInvalidArgument)
        << count;
  }
}

TEST_F(ClientTest, IdsBeyondAnyVocabularyAreRefusedWithTheirPlace) {
  StartDaemon();
  const auto client = NewClient();
  const auto sequence = Prefill(200);
  prompt_[70] = 1u << 31;
  const std::span<const uint32_t> tokens = std::span(prompt_).first(128);
  for (const absl::Status& status :
       {client->Lookup(tokens, {}).status(), client->Publish(*sequence, tokens, {}).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("tokens[70] is 2147483648"), HasSubstr("2147483647")));
  }
  EXPECT_TRUE(client->Publish(*sequence, tokens.first(64), {}).ok()) << "the rest is not held up";
}

TEST_F(ClientTest, ContextKeysThatAreNoTextOrTooLongAreRefusedByName) {
  StartDaemon();
  const auto client = NewClient();
  const auto sequence = Prefill(200);
  const std::span<const uint32_t> tokens = std::span(prompt_).first(128);
  const std::string salt = std::string("salt ") + "\xff\xfe";
  for (const auto& [key, words] : {std::pair{salt, "context_key is not UTF-8"},
                                   std::pair{std::string(257, 'k'), "context_key has 257 bytes"}}) {
    for (const absl::Status& status :
         {client->Lookup(tokens, {.context_key = key}).status(),
          client->Publish(*sequence, tokens, {.context_key = key}).status()}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(words));
    }
  }
  EXPECT_TRUE(client->Publish(*sequence, tokens, {.context_key = std::string(256, 'k')}).ok());
  EXPECT_EQ(client->state().num_attaches, 1u);
}

TEST_F(ClientTest, ProfileOfAnEightBillionModelByTheDefaultRecipeIsTaken) {
  StartDaemon();
  profile_ = MakeTestProfile(
      {.geometry = {.num_layers = 36, .num_kv_heads = 8, .key_dim = 128, .value_dim = 128},
       .codec = CodecId::kOscarInt2Tilted});
  EXPECT_GT(profile_->file().size(), size_t{90} << 20);
  const auto first = NewClient();
  EXPECT_EQ(first->state().last_error, absl::OkStatus());
  const auto second = NewClient();  // Which sends its id alone.
  EXPECT_TRUE((*second->Lookup(prompt_, {}))->Validate().ok());
}

TEST_F(ClientTest, SequenceOfAnotherProfileIsRefusedByName) {
  StartDaemon();
  const auto other = E2eProfile(/*seed=*/2);
  const auto sequence = E2eSequence(other, activations_, 128);
  const absl::Status status =
      NewClient()->Publish(*sequence, std::span(prompt_).first(128), {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(other->id().Short()));
}

TEST_F(ClientTest, DaemonAskedForAGpuArenaWhereThereIsNoGpuSaysSoAndServesFromHostMemory) {
  if (CurrentGpu().ok()) {
    GTEST_SKIP() << "there is a GPU here";
  }
  StartDaemon({"--store.gpu_arena=64MiB", "--store.gpu_chunk=4MiB"});
  EXPECT_THAT(daemon_->Log(), HasSubstr("gpu_arena_off"));
  const auto client = NewClient();
  ASSERT_TRUE(client->Publish(*Prefill(512), std::span(prompt_).first(512), {}).ok());
  const auto prefix = client->Lookup(std::span(prompt_).first(513), {.on_gpu = true});
  ASSERT_TRUE(prefix.ok()) << prefix.status();
  EXPECT_EQ((*prefix)->usable_tokens(), 512u);
  EXPECT_EQ((*prefix)->GpuPage(PageIdx(3), PageEncoding::kInt2), nullptr);
  EXPECT_NE((*prefix)->HeadBlock(PageIdx(3), PageEncoding::kInt2, 0, 0), nullptr);
  EXPECT_TRUE((*prefix)->Validate().ok()) << (*prefix)->Validate();
}

TEST_F(ClientTest, DaemonThatDiesEndsPrefixesAndItsSuccessorIsFound) {
  StartDaemon();
  const auto client = NewClient();
  ASSERT_TRUE(client->Publish(*Prefill(512), std::span(prompt_).first(512), {}).ok());
  const auto prefix = *client->Lookup(prompt_, {});
  ASSERT_TRUE(prefix->Validate().ok());
  const uint64_t epoch = client->state().epoch;
  daemon_->Kill();
  WaitFor([&] { return !client->state().attached; });
  const absl::Status dead = client->Lookup(prompt_, {.timeout = absl::Seconds(1)}).status();
  EXPECT_EQ(dead.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(dead.message()), HasSubstr("not attached to crumbd"));
  EXPECT_EQ(prefix->Validate().code(), absl::StatusCode::kFailedPrecondition);

  RestartDaemon();
  ASSERT_TRUE(client->WaitAttached(absl::Seconds(20)).ok());
  const ClientState state = client->state();
  EXPECT_EQ(state.num_attaches, 2u);
  EXPECT_NE(state.epoch, epoch);
  const std::string words(prefix->Validate().message());
  EXPECT_THAT(words, HasSubstr("epoch " + std::to_string(epoch)));
  EXPECT_THAT(words, HasSubstr("epoch " + std::to_string(state.epoch)));
  EXPECT_EQ((*client->Lookup(prompt_, {}))->num_pages(), 0u);
  EXPECT_TRUE(client->Publish(*Prefill(512), std::span(prompt_).first(512), {}).ok());
  EXPECT_EQ((*client->Lookup(prompt_, {}))->num_pages(), 8u);
}

TEST_F(ClientTest, DaemonKilledUnderLoadCostsNoCallItsDeadline) {
  StartDaemon();
  const auto client = NewClient();
  const auto sequence = Prefill(512);
  for (int round = 0; round < 3; ++round) {
    std::atomic<bool> stop{false};
    std::atomic<int> calls{0};
    std::atomic<int64_t> longest_ms{0};
    std::thread load([&] {
      for (uint32_t key = 0; !stop; ++key) {
        const absl::Time began = Clock::System().Now();
        (void)client->Publish(*sequence, std::span(prompt_).first(512),
                              {.context_key = std::to_string(key), .timeout = absl::Seconds(3)});
        (void)client->Lookup(prompt_, {.context_key = std::to_string(key)});
        longest_ms =
            std::max(longest_ms.load(), absl::ToInt64Milliseconds(Clock::System().Now() - began));
        ++calls;
      }
    });
    WaitFor([&] { return calls > 3; });
    daemon_->Kill();
    const int at_death = calls;
    WaitFor([&] { return calls > at_death + 3; });
    RestartDaemon();
    EXPECT_TRUE(client->WaitAttached(absl::Seconds(20)).ok());
    stop = true;
    load.join();
    EXPECT_LT(longest_ms, 6000);
  }
  EXPECT_TRUE(client->Publish(*sequence, std::span(prompt_).first(512), {}).ok());
}

TEST_F(ClientTest, StoppedDaemonCostsTheDeadlineAndNoMore) {
  StartDaemon();
  const auto client = NewClient();
  const auto sequence = Prefill(512);
  StopDaemon();
  absl::Time began = Clock::System().Now();
  EXPECT_EQ(client->Lookup(prompt_, {.timeout = absl::Milliseconds(200)}).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(
      client
          ->Publish(*sequence, std::span(prompt_).first(512), {.timeout = absl::Milliseconds(200)})
          .status()
          .code(),
      absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(Clock::System().Now() - began, absl::Seconds(2));
  daemon_->Signal(SIGCONT);
  const auto result = client->Publish(*sequence, std::span(prompt_).first(512), {});
  EXPECT_TRUE(result.ok()) << result.status();
}

TEST_F(ClientTest, ClientOfAStoppedDaemonCanBeDestroyed) {
  StartDaemon();
  auto client = NewClient();
  StopDaemon();
  const absl::Time began = Clock::System().Now();
  client = nullptr;
  EXPECT_LT(Clock::System().Now() - began, absl::Seconds(2));
  daemon_->Signal(SIGCONT);
}

TEST_F(ClientTest, PrefixOutlivesItsClientButIsNotToBeBelieved) {
  StartDaemon();
  auto client = NewClient();
  ASSERT_TRUE(client->Publish(*Prefill(512), std::span(prompt_).first(512), {}).ok());
  const auto prefix = *client->Lookup(prompt_, {});
  client = nullptr;
  EXPECT_EQ(prefix->Validate().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(ClientTest, LeasesAreRenewedInTheBackground) {
  StartDaemon({"--store.lease=1s"});
  const auto client = NewClient();
  ASSERT_TRUE(client->Publish(*Prefill(512), std::span(prompt_).first(512), {}).ok());
  const auto prefix = *client->Lookup(prompt_, {});
  const absl::Time until = Clock::System().Now() + absl::Milliseconds(2500);
  WaitFor([&] {
    EXPECT_TRUE(prefix->Validate().ok()) << prefix->Validate();
    return Clock::System().Now() > until;
  });
}

TEST_F(ClientTest, EngineStoppedForLongerThanItsLeaseLosesItsPrefix) {
  StartDaemon({"--store.lease=1s"});
  auto engine = EngineProcess::Start(daemon_->address());
  ASSERT_TRUE(engine.ok()) << engine.status();
  ASSERT_EQ(engine->Ask("publish 5 512"), "published 8 0");
  ASSERT_EQ(engine->Ask("lookup 5 1000"), "found 512");
  ASSERT_EQ(engine->Ask("validate"), "OK");
  engine->Signal(SIGSTOP);
  EXPECT_TRUE(StatusBecomes("\"leases\": 0")) << status_;
  const absl::Time until = Clock::System().Now() + absl::Milliseconds(1200);
  WaitFor([&] { return Clock::System().Now() > until; });
  engine->Send("validate");  // It finds this before its renewal thread can do anything.
  engine->Signal(SIGCONT);
  EXPECT_THAT(engine->ReadLine(), StartsWith("FAILED_PRECONDITION"));
  // The daemon may have given up the whole session; then the engine attaches anew, and goes on.
  WaitFor([&] { return engine->Ask("lookup 5 1000") == "found 512"; });
  EXPECT_EQ(engine->Ask("validate"), "OK");
}

TEST_F(ClientTest, AbsentDaemonIsNamedAtTheTimeoutAndFoundWhenItComes) {
  StartDaemon();
  daemon_->Kill();
  const auto client = *Client::Create({.address = daemon_->address(),
                                       .profile = profile_,
                                       .data_plane = DataPlane::kMap,
                                       .reconnect_backoff_max = absl::Milliseconds(200)});
  const absl::Status status = client->WaitAttached(absl::Milliseconds(300));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr(daemon_->address()));
  RestartDaemon();
  EXPECT_TRUE(client->WaitAttached(absl::Seconds(20)).ok());
}

}  // namespace
}  // namespace crumb
