// SPDX-License-Identifier: Apache-2.0
//
// The library against a real crumbd over real UCX, by tcp alone and with cma. What comes by UCX is
// held against what comes by the map.

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "client/session/control_plane.h"
#include "client/transport/page_source.h"
#include "crumb/client.h"
#include "proto/base/clock.h"
#include "proto/page/namespace_id.h"
#include "tests/client/e2e/client_fixture.h"
#include "tests/client/e2e/e2e_model.h"
#include "tests/client/e2e/engine_process.h"

namespace crumb {
namespace {

using testing::AnyOf;
using testing::HasSubstr;
using testing::StartsWith;

constexpr PageEncoding kEncodings[] = {PageEncoding::kInt2, PageEncoding::kBf16};

class UcxClientTest : public ClientTest, public testing::WithParamInterface<const char*> {
 protected:
  // The environment is how an engine chooses; the daemon would choose by its configuration alone.
  void SetUp() override { ::setenv("UCX_TLS", GetParam(), 1); }  // NOLINT: nobody reads it yet.
  void TearDown() override { ::unsetenv("UCX_TLS"); }            // NOLINT: nor any more.

  void StartUcxDaemon() {
    StartDaemon({"--ucx.enabled=true", std::string("--ucx.transports=") + GetParam()});
  }
  // A model whose prefixes have megabytes: several messages a pull, and several calls a publish.
  void UseLargeModel() {
    profile_ = MakeTestProfile(
        {.geometry = {.num_layers = 16, .num_kv_heads = 4, .key_dim = 128, .value_dim = 128},
         .seed = 3,
         .rotation_per_layer = true});
    activations_ = Activations(*profile_, kE2eQueryHeads, kE2eMaxTokens, /*seed=*/5);
  }
  std::span<const uint32_t> Prompt(size_t num_tokens) const {
    return std::span(prompt_).first(num_tokens);
  }
  // The image; empty where the prefix does not hold that encoding.
  std::vector<std::byte> PageOf(PrefixHandle& prefix, uint32_t page, PageEncoding encoding) const {
    std::vector<std::byte> image(profile_->geometry().PageBytes(encoding));
    return prefix.CopyPage(PageIdx(page), encoding, image).ok() ? image : std::vector<std::byte>();
  }
  // All that `pulled` holds is in `mapped` too, byte for byte, and each page in one encoding.
  void ExpectSameBytes(PrefixHandle& pulled, PrefixHandle& mapped) const {
    ASSERT_EQ(pulled.num_pages(), mapped.num_pages());
    EXPECT_TRUE(pulled.Validate().ok()) << pulled.Validate();
    for (uint32_t page = 0; page < pulled.num_pages(); ++page) {
      size_t encodings = 0;
      for (const PageEncoding encoding : kEncodings) {
        const std::vector<std::byte> image = PageOf(pulled, page, encoding);
        if (!image.empty()) {
          ++encodings;
          EXPECT_TRUE(image == PageOf(mapped, page, encoding)) << "page " << page;
        }
      }
      EXPECT_GE(encodings, 1u) << "page " << page;
    }
    EXPECT_TRUE(mapped.Validate().ok()) << mapped.Validate();
  }
};

INSTANTIATE_TEST_SUITE_P(Transports,
                         UcxClientTest,
                         testing::Values("tcp", "cma,tcp"),
                         [](const auto& test) {
                           return std::string(test.param) == "tcp" ? "TcpAlone" : "CmaAndTcp";
                         });

TEST_P(UcxClientTest, PulledPrefixContinuesTheFirstEngineBitForBit) {
  StartUcxDaemon();
  const auto publisher = NewClient(DataPlane::kMap);
  const auto original = Prefill(512);
  ASSERT_TRUE(publisher->Publish(*original, Prompt(512), {}).ok());

  const auto puller = NewClient(DataPlane::kUcx);
  const auto pulled = puller->Lookup(Prompt(513), {});
  ASSERT_TRUE(pulled.ok()) << pulled.status();
  EXPECT_EQ((*pulled)->usable_tokens(), 512u);
  EXPECT_EQ((*pulled)->data_plane(), DataPlane::kUcx);
  ExpectSameBytes(**pulled, **publisher->Lookup(Prompt(513), {}));
  EXPECT_GT((*pulled)->copied_bytes(), 6 * profile_->geometry().PageBytes(PageEncoding::kInt2));

  const auto heir = *Sequence::Create({.profile = profile_, .num_query_heads = kE2eQueryHeads});
  ASSERT_TRUE(heir->Adopt(*pulled).ok());
  for (const uint32_t chunk : {1u, 64u, 130u}) {
    std::vector<std::vector<float>> expected;
    std::vector<std::vector<float>> found;
    ASSERT_TRUE(RunChunk(original.get(), activations_, chunk, &expected).ok());
    ASSERT_TRUE(RunChunk(heir.get(), activations_, chunk, &found).ok());
    EXPECT_EQ(found, expected);
  }
}

TEST_P(UcxClientTest, WhatIsPublishedByUcxIsWhatTheSequenceHolds) {
  StartUcxDaemon();
  const auto publisher = NewClient(DataPlane::kUcx);
  const auto sequence = Prefill(512);
  const auto published = publisher->Publish(*sequence, Prompt(512), {});
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_EQ(published->pages_added, 8u);
  EXPECT_EQ(published->tail_pages, 2u);

  const auto mapped = *NewClient(DataPlane::kMap)->Lookup(Prompt(513), {});
  ASSERT_EQ(mapped->usable_tokens(), 512u);
  for (uint32_t page = 0; page < 8; ++page) {
    for (const PageEncoding encoding : kEncodings) {
      const std::vector<std::byte> found = PageOf(*mapped, page, encoding);
      std::vector<std::byte> expected(profile_->geometry().PageBytes(encoding));
      if (!found.empty() && sequence->ExportPage(PageIdx(page), encoding, expected).ok()) {
        EXPECT_TRUE(found == expected) << "page " << page;
      }
    }
  }
  const auto again = publisher->Publish(*sequence, Prompt(512), {});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->bytes_sent, 0u);
}

TEST_P(UcxClientTest, PrefixOfMegabytesTakesSeveralCallsAndMessages) {
  UseLargeModel();
  StartUcxDaemon();
  const auto client = NewClient(DataPlane::kUcx);
  const auto sequence = Prefill(kE2eMaxTokens);
  const auto published = client->Publish(*sequence, prompt_, {});
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_EQ(published->pages_added, 16u);
  EXPECT_GT(published->bytes_sent, size_t{8} << 20) << "fits into one call: a larger model, please";
  const auto pulled = client->Lookup(prompt_, {.allow_int2_window = true});
  ASSERT_TRUE(pulled.ok()) << pulled.status();
  ASSERT_TRUE((*pulled)->WaitForLayer(0).ok());
  ExpectSameBytes(**pulled,
                  **NewClient(DataPlane::kMap)->Lookup(prompt_, {.allow_int2_window = true}));
}

TEST_P(UcxClientTest, AutoTakesTheMapWhereItIsAndSaysWhyWhereItIsNot) {
  StartUcxDaemon();
  const auto near = NewClient(DataPlane::kAuto);
  EXPECT_EQ(near->state().data_plane, DataPlane::kMap);
  EXPECT_EQ(near->state().data_plane_note, "");
  // As it is for an engine in a container that was given no memory socket.
  std::filesystem::remove(daemon_->socket_path().string() + ".mem");
  const auto far = NewClient(DataPlane::kAuto);
  EXPECT_EQ(far->state().data_plane, DataPlane::kUcx);
  EXPECT_THAT(far->state().data_plane_note, HasSubstr("no memory map: "));
  EXPECT_THAT(far->state().data_plane_note, HasSubstr("crumbd.sock.mem"));
  ASSERT_TRUE(far->Publish(*Prefill(512), Prompt(512), {}).ok());
  ExpectSameBytes(**far->Lookup(prompt_, {}), **near->Lookup(prompt_, {}));
}

TEST_P(UcxClientTest, StoppedDaemonCostsAPullItsDeadlineAndADeadOneLess) {
  StartUcxDaemon();
  ASSERT_TRUE(NewClient(DataPlane::kUcx)->Publish(*Prefill(512), Prompt(512), {}).ok());
  const auto control = ControlPlane::Create(daemon_->address());
  const auto attached = control->Attach(
      {.client_name = "puller", .tenant = "default", .profile = profile_, .heads = {0, 2}});
  ASSERT_TRUE(attached.ok()) << attached.status();
  const absl::Time soon = Clock::System().Now() + absl::Seconds(10);
  const auto found = control->Lookup({.context_key = "", .tokens = prompt_}, soon);
  ASSERT_TRUE(found.ok()) << found.status();
  const auto transport = ConnectUcx(attached->info, soon);
  ASSERT_TRUE(transport.ok()) << transport.status();
  const LeasedPrefix prefix{.lease = found->lease,
                            .namespace_id = ComputeNamespaceId("default", profile_->id(), ""),
                            .pages = found->pages};
  StopDaemon();
  const absl::Time began = Clock::System().Now();
  const auto late = (*transport)->Open(prefix, began + absl::Milliseconds(300));
  ASSERT_TRUE(late.ok()) << late.status();
  EXPECT_EQ((*late)->WaitForLayer(0).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(Clock::System().Now() - began, absl::Seconds(3));

  const auto lost = (*transport)->Open(prefix, Clock::System().Now() + absl::Seconds(60));
  ASSERT_TRUE(lost.ok()) << lost.status();
  daemon_->Kill();
  const absl::Time killed = Clock::System().Now();
  EXPECT_EQ((*lost)->Validate().code(), absl::StatusCode::kUnavailable) << (*lost)->Validate();
  EXPECT_LT(Clock::System().Now() - killed, absl::Seconds(20)) << "waited for the deadline";
}

TEST_P(UcxClientTest, DaemonKilledInAPullIsAnErrorByTheDeadlineAndItsSuccessorIsFound) {
  UseLargeModel();
  StartUcxDaemon();
  const auto client = NewClient(DataPlane::kUcx);
  const auto sequence = Prefill(kE2eMaxTokens);
  for (uint64_t round = 0; round < 3; ++round) {
    ASSERT_TRUE(client->WaitAttached(absl::Seconds(20)).ok());
    const auto published = client->Publish(*sequence, prompt_, {});
    ASSERT_TRUE(published.ok()) << published.status();
    const auto whole = client->Lookup(prompt_, {});
    ASSERT_TRUE(whole.ok()) << whole.status();
    EXPECT_TRUE((*whole)->Validate().ok()) << (*whole)->Validate();

    const auto pulled = client->Lookup(prompt_, {.pull_timeout = absl::Seconds(5)});
    ASSERT_TRUE(pulled.ok()) << pulled.status();
    const absl::Time began = Clock::System().Now();
    daemon_->Kill();
    // Sooner or later: all bytes may have come, and it takes a moment to see that the lease is
    // gone.
    WaitFor([&] { return !(*pulled)->Validate().ok(); });
    EXPECT_LT(Clock::System().Now() - began, absl::Seconds(8));
    RestartDaemon();
  }
  ASSERT_TRUE(client->WaitAttached(absl::Seconds(20)).ok());
  EXPECT_EQ(client->state().num_attaches, 4u);
  EXPECT_EQ(client->state().data_plane, DataPlane::kUcx);
}

TEST_P(UcxClientTest, DaemonKilledUnderPublishesCostsNoCallItsDeadline) {
  UseLargeModel();
  StartUcxDaemon();
  const auto client = NewClient(DataPlane::kUcx);
  const auto sequence = Prefill(kE2eMaxTokens);
  std::atomic<bool> stop{false};
  std::atomic<int> published{0};
  std::atomic<int> failed{0};
  std::atomic<int64_t> longest_ms{0};
  std::thread load([&] {
    for (uint32_t key = 0; !stop; ++key) {
      const absl::Time began = Clock::System().Now();
      const auto result = client->Publish(
          *sequence, prompt_, {.context_key = std::to_string(key), .timeout = absl::Seconds(10)});
      longest_ms =
          std::max(longest_ms.load(), absl::ToInt64Milliseconds(Clock::System().Now() - began));
      ++(result.ok() ? published : failed);
    }
  });
  for (int round = 0; round < 2; ++round) {
    const int before = published;
    WaitFor([&] { return published > before + 1; });
    const int failed_before = failed;
    daemon_->Kill();
    WaitFor([&] { return failed > failed_before; });
    RestartDaemon();
  }
  const int before = published;
  WaitFor([&] { return published > before; });
  stop = true;
  load.join();
  EXPECT_LT(longest_ms, 10'000) << "a dead daemon is seen before the deadline";
}

TEST_P(UcxClientTest, EnginesKilledAtAnyMomentLeaveNothing) {
  StartUcxDaemon();
  for (uint32_t round = 1; round <= 4; ++round) {
    auto engine = EngineProcess::Start(daemon_->address(), "ucx");
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine->Send("churn " + std::to_string(100 * round));
    for (uint32_t line = 0; line < round; ++line) {
      ASSERT_THAT(engine->ReadLine(), StartsWith("published"));
    }
    engine->Kill();
    EXPECT_TRUE(StatusBecomes("\"sessions\": []")) << status_;
    EXPECT_TRUE(StatusBecomes("\"leases\": 0")) << status_;
    EXPECT_TRUE(StatusBecomes("\"publishes\": 0")) << status_;
  }
  const auto client = NewClient(DataPlane::kUcx);
  ASSERT_TRUE(client->Publish(*Prefill(512), Prompt(512), {}).ok());
  EXPECT_TRUE((*client->Lookup(prompt_, {}))->Validate().ok());
}

TEST_P(UcxClientTest, PullOfAnEngineStoppedForLongerThanItsLeaseIsNotBelieved) {
  StartDaemon(
      {"--ucx.enabled=true", std::string("--ucx.transports=") + GetParam(), "--store.lease=1s"});
  auto engine = EngineProcess::Start(daemon_->address(), "ucx");
  ASSERT_TRUE(engine.ok()) << engine.status();
  ASSERT_EQ(engine->Ask("publish 5 512"), "published 8 0");
  ASSERT_EQ(engine->Ask("lookup 5 1000"), "found 512");
  engine->Signal(SIGSTOP);
  EXPECT_TRUE(StatusBecomes("\"leases\": 0")) << status_;
  engine->Send("validate");
  engine->Signal(SIGCONT);
  // UNAVAILABLE: the daemon gave the engine up before the last byte had come.
  EXPECT_THAT(engine->ReadLine(),
              AnyOf(StartsWith("FAILED_PRECONDITION"), StartsWith("UNAVAILABLE")));
  WaitFor([&] { return engine->Ask("lookup 5 1000") == "found 512"; });
  EXPECT_EQ(engine->Ask("validate"), "OK");
}

TEST_F(ClientTest, UcxThatIsNotOfferedIsNamedWithItsRemedy) {
  StartDaemon();
  const auto client = *Client::Create(
      {.address = daemon_->address(), .profile = profile_, .data_plane = DataPlane::kUcx});
  const absl::Status status = client->WaitAttached(absl::Milliseconds(500));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("enabled = true in [ucx]"));
}

}  // namespace
}  // namespace crumb
