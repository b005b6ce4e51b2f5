// SPDX-License-Identifier: Apache-2.0
//
// What a crumbd must survive or refuse: noise on its sockets, an arena of one page, pages that are
// not what they say, its own end while engines are attached.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "crumb/client.h"
#include "proto/base/bfloat16.h"
#include "proto/base/unique_fd.h"
#include "tests/client/e2e/client_fixture.h"
#include "tests/client/e2e/e2e_model.h"
#include "tests/client/e2e/raw_session.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// Connects, writes until all is written or the other end has had enough, and hangs up.
void SendNoise(int type, const sockaddr* address, socklen_t length, const std::string& noise) {
  const UniqueFd fd(::socket(address->sa_family, type | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::connect(fd.get(), address, length), 0) << "error " << errno;
  for (size_t sent = 0; sent < noise.size();) {
    const ssize_t count = ::send(fd.get(), noise.data() + sent,
                                 std::min<size_t>(noise.size() - sent, 4096), MSG_NOSIGNAL);
    if (count <= 0) {
      return;
    }
    sent += static_cast<size_t>(count);
  }
}

void SendNoiseToUnixSocket(int type, const std::string& path, const std::string& noise) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  SendNoise(type, reinterpret_cast<const sockaddr*>(&address), sizeof(address), noise);
}

void SendNoiseToPort(uint32_t port, const std::string& noise) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  SendNoise(SOCK_STREAM, reinterpret_cast<const sockaddr*>(&address), sizeof(address), noise);
}

using BadInputTest = ClientTest;

TEST_F(BadInputTest, NoiseOnEverySocketDisturbsNoClient) {
  StartDaemon({"--ucx.enabled=true", "--listen.tcp=127.0.0.1:0"});
  const auto by_map = NewClient(DataPlane::kMap);
  const auto by_ucx = NewClient(DataPlane::kUcx);
  const auto sequence = Prefill(512);
  std::atomic<bool> stop{false};
  std::atomic<int> rounds{0};
  std::thread work([&] {
    for (uint32_t key = 0; !stop; ++key) {
      for (Client* client : {by_map.get(), by_ucx.get()}) {
        const std::string context_key = std::to_string(key % 8);
        const auto published =
            client->Publish(*sequence, std::span(prompt_).first(512), {.context_key = context_key});
        EXPECT_TRUE(published.ok()) << published.status();
        const auto prefix = client->Lookup(prompt_, {.context_key = context_key});
        ASSERT_TRUE(prefix.ok()) << prefix.status();
        EXPECT_EQ((*prefix)->matched_tokens(), 512u);
        EXPECT_TRUE((*prefix)->Validate().ok()) << (*prefix)->Validate();
      }
      ++rounds;
    }
  });
  const uint32_t ucx_port = RawSession(daemon_->address(), profile_).info().ucx_port;
  const auto tcp_port = static_cast<uint32_t>(daemon_->ReadyNumber("tcp_port"));
  // What HTTP/2 begins with: behind it, noise reaches the reader of its frames.
  const std::string preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int i = 0; i < 40; ++i) {
    std::string noise(1 + random() % 20000, '\0');
    for (char& c : noise) {
      c = static_cast<char>(random());
    }
    const std::string to_grpc = i % 4 < 2 ? noise : preface + noise;
    SendNoiseToUnixSocket(SOCK_STREAM, daemon_->socket_path(), to_grpc);
    SendNoiseToPort(tcp_port, to_grpc);
    SendNoiseToUnixSocket(SOCK_SEQPACKET, daemon_->socket_path().string() + ".mem",
                          noise.substr(0, i % 2 == 0 ? 40 : noise.size()));
    SendNoiseToPort(ucx_port, noise);
  }
  const int before = rounds;
  WaitFor([&] { return rounds > before + 2; });
  stop = true;
  work.join();
  EXPECT_EQ(by_map->state().num_attaches, 1u) << by_map->state().last_error;
  EXPECT_EQ(by_ucx->state().num_attaches, 1u) << by_ucx->state().last_error;
  EXPECT_EQ(NewClient(DataPlane::kUcx)->state().num_attaches, 1u) << "newcomers are served";
}

TEST_F(BadInputTest, ProbeOfAnUnknownNamespaceNamesIt) {
  StartDaemon();
  const auto probe = [&](const std::string& name) {
    return RunProgram("crumbctl", {"--address=" + daemon_->address(), "probe", "--namespace", name,
                                   "--tokens", "1,2,3"});
  };
  EXPECT_THAT(probe("").err, HasSubstr("the daemon holds no namespace yet"));
  ASSERT_TRUE(NewClient()->Publish(*Prefill(512), std::span(prompt_).first(512), {}).ok());
  const ProgramResult unknown = probe("0123456789abcdef");
  EXPECT_EQ(unknown.exit_status, 1);
  EXPECT_THAT(unknown.err, HasSubstr("no namespace starts with 0123456789abcdef"));
  EXPECT_THAT(unknown.err, HasSubstr("crumbctl status"));
  EXPECT_EQ(probe("").exit_status, 0);
}

TEST_F(BadInputTest, ArenaOfOnePageTakesTheNextPrefixOnlyWhenTheFirstIsFree) {
  // A page of the sink has 64 KiB in BF16, and its header.
  StartDaemon({"--store.capacity=100KiB", "--store.quarantine=1s"});
  const auto client = NewClient();
  const auto sequence = Prefill(64);
  const std::vector<uint32_t> other = E2ePrompt(6, 100);
  const auto publish = [&](const std::vector<uint32_t>& tokens) {
    return client->Publish(*sequence, std::span(tokens).first(64), {});
  };
  const auto matched = [&](const std::vector<uint32_t>& tokens) {
    return (*client->Lookup(tokens, {}))->matched_tokens();
  };
  ASSERT_TRUE(publish(prompt_).ok());
  auto held = *client->Lookup(prompt_, {});
  ASSERT_EQ(held->num_pages(), 1u);
  const absl::Status full = publish(other).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  EXPECT_THAT(std::string(full.message()), AllOf(HasSubstr("[store] capacity is 102400"),
                                                 HasSubstr("1 pages are held by 1 leases"),
                                                 HasSubstr("Raise [store] capacity")));
  EXPECT_TRUE(held->Validate().ok()) << held->Validate();
  EXPECT_EQ(matched(prompt_), 64u);

  held = nullptr;  // Released in the background.
  absl::Status second;
  WaitFor([&] {
    second = publish(other).status();
    return second.code() != absl::StatusCode::kResourceExhausted;
  });
  EXPECT_TRUE(second.ok()) << second;
  EXPECT_EQ(matched(prompt_), 0u);
  EXPECT_EQ(matched(other), 64u);
  const absl::Status two =
      client->Publish(*Prefill(512), std::span(prompt_).first(512), {}).status();
  EXPECT_EQ(two.code(), absl::StatusCode::kResourceExhausted) << two;
}

TEST_F(BadInputTest, PagesWithNanAreRefusedByLayerHeadAndToken) {
  StartDaemon();
  RawSession session(daemon_->address(), profile_);
  const std::span<const uint32_t> tokens = std::span(prompt_).first(128);
  const size_t page = session.PageElements();
  const size_t block = profile_->geometry().Bf16Block().bytes() / sizeof(BFloat16);
  const BFloat16 nan = BFloat16::FromFloat(std::numeric_limits<float>::quiet_NaN());
  std::vector<BFloat16> rows(2 * page);
  // [kv_head][layer] blocks; K of a token has 64 elements. Page 0 is kept, page 1 is demoted.
  for (const uint32_t bad_page : {0u, 1u}) {
    BFloat16& element = rows[bad_page * page + (1 * 2 + 0) * block + size_t{7} * 64 + 3];
    element = nan;
    const absl::Status status = session.Publish(tokens, rows).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("layer 0"), HasSubstr("head 1"),
                      HasSubstr("token " + std::to_string(64 * bad_page + 7))));
    element = BFloat16();
  }
  EXPECT_EQ(session.MatchedTokens(tokens), 0u) << "nothing of it is visible";
  EXPECT_TRUE(session.Publish(tokens, rows).ok());
  EXPECT_EQ(session.MatchedTokens(tokens), 128u);
}

TEST_F(BadInputTest, PagesWithAnotherChecksumAreDataLoss) {
  StartDaemon();
  RawSession session(daemon_->address(), profile_);
  const std::span<const uint32_t> tokens = std::span(prompt_).first(64);
  const std::vector<BFloat16> rows(session.PageElements());
  const absl::Status status = session.Publish(tokens, rows, /*checksum_error=*/1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("page 0"), HasSubstr("KV head 0"), HasSubstr("was announced")));
  EXPECT_EQ(session.MatchedTokens(tokens), 0u);
  EXPECT_TRUE(session.Publish(tokens, rows).ok());
}

TEST_F(BadInputTest, PagesOutOfOrderTwiceOrCommittedAgainAreRefusedByNameAndLoseNothing) {
  StartDaemon();
  RawSession session(daemon_->address(), profile_);
  const std::span<const uint32_t> tokens = std::span(prompt_).first(128);
  const std::vector<BFloat16> rows(2 * session.PageElements());
  const auto good = session.Stage(tokens, rows);
  ASSERT_TRUE(good.ok()) << good.status();
  const auto refusal = [&](const CommitParams& params) {
    const absl::Status status = session.Commit(params).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(session.MatchedTokens(tokens), 0u);
    return std::string(status.message());
  };
  CommitParams swapped = *good;
  std::swap(swapped.staged[0], swapped.staged[1]);
  EXPECT_THAT(refusal(swapped), AllOf(HasSubstr("staged page 0"), HasSubstr("page 1")));
  CommitParams twice = *good;
  twice.staged.push_back(twice.staged.back());
  EXPECT_THAT(refusal(twice), HasSubstr("staged page 1"));
  CommitParams beyond = *good;
  beyond.staged.back().page = PageIdx(2);
  EXPECT_THAT(refusal(beyond), HasSubstr("staged page 2"));

  ASSERT_TRUE(session.Commit(*good).ok());
  EXPECT_EQ(session.MatchedTokens(tokens), 128u);
  const absl::Status again = session.Commit(*good).status();
  EXPECT_EQ(again.code(), absl::StatusCode::kNotFound) << again;
  EXPECT_THAT(std::string(again.message()), HasSubstr(std::to_string(good->publish.value())));
  EXPECT_EQ(session.MatchedTokens(tokens), 128u);
  session.EndStaging();
}

TEST_F(BadInputTest, SigtermEndsADaemonWithAttachedClientsWithStatusZero) {
  StartDaemon({"--ucx.enabled=true"});
  const auto by_map = NewClient(DataPlane::kMap);
  const auto by_ucx = NewClient(DataPlane::kUcx);
  ASSERT_TRUE(by_map->Publish(*Prefill(512), std::span(prompt_).first(512), {}).ok());
  const auto mapped = *by_map->Lookup(prompt_, {});
  const auto pulled = *by_ucx->Lookup(prompt_, {});
  ASSERT_TRUE(pulled->Validate().ok()) << pulled->Validate();
  const auto exit_status = daemon_->Stop();
  ASSERT_TRUE(exit_status.ok()) << exit_status.status();
  EXPECT_EQ(*exit_status, 0) << daemon_->Log();
  WaitFor([&] { return !by_map->state().attached && !by_ucx->state().attached; });
  EXPECT_EQ(mapped->Validate().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(pulled->Validate().code(), absl::StatusCode::kFailedPrecondition);
  RestartDaemon();
  EXPECT_TRUE(by_map->WaitAttached(absl::Seconds(20)).ok());
  EXPECT_TRUE(by_ucx->WaitAttached(absl::Seconds(20)).ok());
}

class DrainTest : public BadInputTest {
 protected:
  // A publish that is staged and not committed, which SIGTERM then finds; the daemon says so.
  void DrainWithAPublishUnderWay(const std::string& timeout) {
    StartDaemon({"--listen.drain_timeout=" + timeout});
    session_.emplace(daemon_->address(), profile_);
    staged_ = session_->Stage(std::span(prompt_).first(64),
                              std::vector<BFloat16>(session_->PageElements()));
    ASSERT_TRUE(staged_.ok()) << staged_.status();
    began_ = Clock::System().Now();
    daemon_->Signal(SIGTERM);
    WaitFor([&] { return daemon_->Log().find("draining publishes=1") != std::string::npos; });
  }
  absl::Duration Elapsed() const { return Clock::System().Now() - began_; }

  std::optional<RawSession> session_;
  absl::StatusOr<CommitParams> staged_;
  absl::Time began_;
};

TEST_F(DrainTest, WhatWasBegunIsFinishedAndNothingNewIsBegun) {
  DrainWithAPublishUnderWay("20s");
  const absl::Status late = session_->Lookup(prompt_).status();
  EXPECT_EQ(late.code(), absl::StatusCode::kUnavailable) << late;
  EXPECT_THAT(std::string(late.message()), HasSubstr("drain"));
  const auto counts = session_->Commit(*staged_);
  EXPECT_TRUE(counts.ok()) << counts.status();
  const auto exit_status = daemon_->Wait(absl::Seconds(20));
  ASSERT_TRUE(exit_status.ok()) << exit_status.status();
  EXPECT_EQ(*exit_status, 0);
  EXPECT_LT(Elapsed(), absl::Seconds(10)) << "waited for its timeout";
}

TEST_F(DrainTest, WhatIsNotFinishedIsWaitedForUntilTheTimeout) {
  DrainWithAPublishUnderWay("500ms");
  const auto exit_status = daemon_->Wait(absl::Seconds(20));
  ASSERT_TRUE(exit_status.ok()) << exit_status.status();
  EXPECT_EQ(*exit_status, 0) << daemon_->Log();
  EXPECT_GE(Elapsed(), absl::Milliseconds(500));
  EXPECT_LT(Elapsed(), absl::Seconds(5));
  EXPECT_EQ(session_->Commit(*staged_).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(DrainTest, SecondSignalEndsItAtOnceWithItsNumber) {
  DrainWithAPublishUnderWay("1h");
  daemon_->Signal(SIGINT);
  const auto exit_status = daemon_->Wait(absl::Seconds(20));
  ASSERT_TRUE(exit_status.ok()) << exit_status.status();
  EXPECT_EQ(*exit_status, 128 + SIGINT);
  RestartDaemon();  // What the end left lying about is replaced.
  EXPECT_EQ(NewClient()->state().num_attaches, 1u);
}

TEST_F(ClientTest, PrefixIsNotBroughtToAGpuThatWasNotNamed) {
  StartDaemon();
  const auto client = NewClient();
  ASSERT_TRUE(client->Publish(*Prefill(512), std::span(prompt_).first(512), {}).ok());
  const auto prefix = *client->Lookup(std::span(prompt_).first(513), {.on_gpu = true});
  EXPECT_EQ(prefix->GpuPage(PageIdx(1), PageEncoding::kInt2), nullptr);
  EXPECT_NE(prefix->HeadBlock(PageIdx(1), PageEncoding::kInt2, 0, 0), nullptr);
  const auto upload = prefix->UploadToGpu({});
  EXPECT_EQ(upload.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(upload.status().message()), HasSubstr("ClientOptions::gpu"));
}

}  // namespace
}  // namespace crumb
