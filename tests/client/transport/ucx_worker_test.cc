// SPDX-License-Identifier: Apache-2.0
//
// Two workers in one process, over loopback, by tcp alone and with cma.
#include "client/transport/ucx_worker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

namespace crumb {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kSoon = absl::Seconds(20);  // Longer than a loaded machine needs.

std::span<const std::byte> AsBytes(const std::string& text) {
  return std::as_bytes(std::span(text));
}

// Notes what happened; receives each payload into memory of its own.
class Recorder final : public UcxWorker::Handler {
 public:
  bool OnPeer(UcxPeerId peer) override {
    const absl::MutexLock lock(&mutex_);
    peers_.push_back(peer);
    return accepts_;
  }
  void OnMessage(UcxPeerId peer, UcxMessage& message) override {
    auto received = std::make_shared<Received>();
    received->peer = peer;
    received->header.assign(reinterpret_cast<const char*>(message.header().data()),
                            message.header().size());
    received->was_rendezvous = message.payload().empty() && message.payload_bytes() > 0;
    if (!drops_) {
      received->payload.resize(message.payload_bytes());
      message.Receive(received->payload, [this, received](const absl::Status& status) {
        received->status = status;
        const absl::MutexLock lock(&mutex_);
        received_.push_back(received);
      });
    }
  }
  void OnLost(UcxPeerId, const absl::Status& reason) override {
    const absl::MutexLock lock(&mutex_);
    lost_.push_back(reason);
  }
  void OnTick(absl::Time) override { ++ticks_; }

  struct Received {
    UcxPeerId peer;
    std::string header;
    std::vector<std::byte> payload;
    bool was_rendezvous = false;
    absl::Status status;
  };
  bool WaitReceived(size_t count) {
    const absl::MutexLock lock(&mutex_);
    const auto enough = [&] { return received_.size() >= count; };
    return mutex_.AwaitWithTimeout(absl::Condition(&enough), kSoon);
  }
  bool WaitLost() {
    const absl::MutexLock lock(&mutex_);
    const auto any = [&] { return !lost_.empty(); };
    return mutex_.AwaitWithTimeout(absl::Condition(&any), kSoon);
  }
  std::vector<std::shared_ptr<Received>> received() {
    const absl::MutexLock lock(&mutex_);
    return received_;
  }
  std::vector<absl::Status> lost() {
    const absl::MutexLock lock(&mutex_);
    return lost_;
  }
  std::vector<UcxPeerId> peers() {
    const absl::MutexLock lock(&mutex_);
    return peers_;
  }
  void Reject() { accepts_ = false; }
  void DropPayloads() { drops_ = true; }

 private:
  absl::Mutex mutex_;
  std::vector<std::shared_ptr<Received>> received_ ABSL_GUARDED_BY(mutex_);
  std::vector<absl::Status> lost_ ABSL_GUARDED_BY(mutex_);
  std::vector<UcxPeerId> peers_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> accepts_{true};
  std::atomic<bool> drops_{false};
  std::atomic<uint64_t> ticks_{0};
};

class UcxWorkerTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    options_.transports = GetParam();
    auto server = UcxWorker::Create(options_, server_handler_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    auto client = UcxWorker::Create(options_, client_handler_);
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    ASSERT_TRUE(server_
                    ->Call([this] {
                      const auto port = server_->Listen("127.0.0.1", 0);
                      port_ = port.value_or(0);
                      return port.status();
                    })
                    .ok());
    ASSERT_NE(port_, 0);
  }

  UcxPeerId Connect(uint16_t port) {
    UcxPeerId peer;
    EXPECT_TRUE(client_
                    ->Call([&] {
                      const auto connected = client_->Connect("127.0.0.1", port);
                      peer = connected.value_or(UcxPeerId());
                      return connected.status();
                    })
                    .ok());
    return peer;
  }

  // Sends and waits for the end of the transfer.
  absl::Status Send(UcxPeerId peer,
                    const std::string& header,
                    std::span<const std::byte> payload,
                    UcxSend how) {
    auto ended = std::make_shared<absl::Notification>();
    auto result = std::make_shared<absl::Status>();
    const absl::Status posted = client_->Post([this, peer, header, payload, how, ended, result] {
      client_->Send(peer, AsBytes(header), payload, how, [=](const absl::Status& status) {
        *result = status;
        ended->Notify();
      });
    });
    if (!posted.ok()) {
      return posted;
    }
    if (!ended->WaitForNotificationWithTimeout(kSoon)) {
      return absl::DeadlineExceededError("a send has not ended");
    }
    return *result;
  }

  UcxOptions options_;
  Recorder server_handler_;
  Recorder client_handler_;
  uint16_t port_ = 0;
  std::unique_ptr<UcxWorker> server_;
  std::unique_ptr<UcxWorker> client_;
};

std::vector<std::byte> Pattern(size_t bytes) {
  std::vector<std::byte> pattern(bytes);
  for (size_t idx = 0; idx < bytes; ++idx) {
    pattern[idx] = static_cast<std::byte>(idx * 131 + idx / 251);
  }
  return pattern;
}

TEST_P(UcxWorkerTest, HeadersAndPayloadsOfAllSizesArriveAsSent) {
  const UcxPeerId peer = Connect(port_);
  size_t count = 0;
  for (const size_t bytes : {0u, 1u, 100u, 8192u, 70000u, 1u << 20, 5u << 20}) {
    for (const UcxSend how : {UcxSend::kCopy, UcxSend::kRendezvous}) {
      if (bytes == 0 && how == UcxSend::kRendezvous) {
        continue;
      }
      const std::vector<std::byte> payload = Pattern(bytes);
      const std::string header = "header of " + std::to_string(bytes);
      ASSERT_TRUE(Send(peer, header, payload, how).ok()) << bytes;
      ASSERT_TRUE(server_handler_.WaitReceived(++count)) << bytes;
      const auto last = server_handler_.received().back();
      EXPECT_EQ(last->header, header);
      EXPECT_EQ(last->was_rendezvous, how == UcxSend::kRendezvous);
      EXPECT_EQ(last->payload, payload);
      EXPECT_TRUE(last->status.ok()) << last->status;
    }
  }
}

TEST_P(UcxWorkerTest, ANappingSenderRunsTasksAtOnceAndItsTransfersEnd) {
  options_.nap = 10 * kSoon;  // So that only tasks end it.
  Recorder handler;
  auto sender = UcxWorker::Create(options_, handler);
  ASSERT_TRUE(sender.ok()) << sender.status();
  const std::vector<std::byte> payload = Pattern(1 << 20);
  std::atomic<int> ended{0};
  ASSERT_TRUE((*sender)
                  ->Call([&] {
                    const auto peer = (*sender)->Connect("127.0.0.1", port_);
                    for (int i = 0; peer.ok() && i < 8; ++i) {
                      (*sender)->Send(*peer, AsBytes("piece"), payload, UcxSend::kRendezvous,
                                      [&](const absl::Status& status) { ended += status.ok(); });
                    }
                    return peer.status();
                  })
                  .ok());
  const absl::Time end = Clock::System().Now() + kSoon;
  while (ended < 8 && Clock::System().Now() < end) {
    ASSERT_TRUE((*sender)->Call([] { return absl::OkStatus(); }).ok());
  }
  EXPECT_EQ(ended, 8);
  ASSERT_TRUE(server_handler_.WaitReceived(8));
  for (const auto& received : server_handler_.received()) {
    EXPECT_EQ(received->payload, payload);
  }
}

TEST_P(UcxWorkerTest, ANappingReceiverRunsTasksAtOnceAndTakesWhatComes) {
  options_.nap = 10 * kSoon;  // So that only tasks end it.
  Recorder handler;
  auto receiver = UcxWorker::Create(options_, handler);
  ASSERT_TRUE(receiver.ok()) << receiver.status();
  uint16_t port = 0;
  ASSERT_TRUE((*receiver)
                  ->Call([&] {
                    const auto listening = (*receiver)->Listen("127.0.0.1", 0);
                    port = listening.value_or(0);
                    return listening.status();
                  })
                  .ok());
  const UcxPeerId peer = Connect(port);
  const std::vector<std::byte> payload = Pattern(1 << 20);
  ASSERT_TRUE(client_
                  ->Call([&] {
                    for (int i = 0; i < 8; ++i) {
                      client_->Send(peer, AsBytes("piece"), payload, UcxSend::kRendezvous,
                                    [](const absl::Status&) {});
                    }
                    return absl::OkStatus();
                  })
                  .ok());
  const absl::Time end = Clock::System().Now() + kSoon;
  while (handler.received().size() < 8 && Clock::System().Now() < end) {
    ASSERT_TRUE((*receiver)->Call([] { return absl::OkStatus(); }).ok());
  }
  ASSERT_EQ(handler.received().size(), 8);
  for (const auto& received : handler.received()) {
    EXPECT_EQ(received->payload, payload);
  }
}

TEST_P(UcxWorkerTest, AnswersGoBackToWhoAsked) {
  const UcxPeerId peer = Connect(port_);
  ASSERT_TRUE(Send(peer, "ask", {}, UcxSend::kCopy).ok());
  ASSERT_TRUE(server_handler_.WaitReceived(1));
  const UcxPeerId asker = server_handler_.received()[0]->peer;
  const std::vector<std::byte> payload = Pattern(1 << 20);
  ASSERT_TRUE(server_
                  ->Post([&] {
                    server_->Send(asker, AsBytes("answer"), payload, UcxSend::kRendezvous,
                                  [](const absl::Status&) {});
                  })
                  .ok());
  ASSERT_TRUE(client_handler_.WaitReceived(1));
  EXPECT_EQ(client_handler_.received()[0]->payload, payload);
  EXPECT_EQ(client_handler_.received()[0]->peer, peer);
}

TEST_P(UcxWorkerTest, APayloadThatNobodyTakesEndsTheSend) {
  server_handler_.DropPayloads();
  const UcxPeerId peer = Connect(port_);
  const std::vector<std::byte> payload = Pattern(1 << 20);
  EXPECT_TRUE(Send(peer, "x", payload, UcxSend::kRendezvous).ok());
}

TEST_P(UcxWorkerTest, NobodyListeningIsToldAsLost) {
  Connect(1);  // tcpmux: nobody has it.
  ASSERT_TRUE(client_handler_.WaitLost());
  EXPECT_EQ(client_handler_.lost()[0].code(), absl::StatusCode::kUnavailable)
      << client_handler_.lost()[0];
}

TEST_P(UcxWorkerTest, APeerTurnedAwayIsToldAsLost) {
  server_handler_.Reject();
  Connect(port_);
  ASSERT_TRUE(client_handler_.WaitLost());
  EXPECT_EQ(client_handler_.lost()[0].code(), absl::StatusCode::kUnavailable);
}

TEST_P(UcxWorkerTest, BothEndsLearnOfAClose) {
  const UcxPeerId peer = Connect(port_);
  ASSERT_TRUE(Send(peer, "x", {}, UcxSend::kCopy).ok());
  ASSERT_TRUE(server_handler_.WaitReceived(1));
  ASSERT_TRUE(client_->Post([&] { client_->Close(peer, absl::AbortedError("enough")); }).ok());
  ASSERT_TRUE(client_handler_.WaitLost());
  EXPECT_EQ(client_handler_.lost()[0], absl::AbortedError("enough"));
  EXPECT_TRUE(server_handler_.WaitLost());
  EXPECT_EQ(Send(peer, "x", {}, UcxSend::kCopy).code(), absl::StatusCode::kUnavailable);
}

TEST_P(UcxWorkerTest, DestroyedWithTransfersUnderWayEachEndsOnce) {
  const UcxPeerId peer = Connect(port_);
  ASSERT_TRUE(Send(peer, "x", {}, UcxSend::kCopy).ok());
  const std::vector<std::byte> payload = Pattern(4 << 20);
  std::atomic<int> ended{0};
  ASSERT_TRUE(client_
                  ->Call([&] {
                    for (int i = 0; i < 16; ++i) {
                      client_->Send(peer, AsBytes("y"), payload, UcxSend::kRendezvous,
                                    [&](const absl::Status&) { ++ended; });
                    }
                    return absl::OkStatus();
                  })
                  .ok());
  client_.reset();
  EXPECT_EQ(ended, 16);
  server_.reset();
}

TEST_P(UcxWorkerTest, PostRefusesBeyondItsBound) {
  absl::Notification entered;
  absl::Notification go_on;
  ASSERT_TRUE(client_
                  ->Post([&] {
                    entered.Notify();
                    go_on.WaitForNotification();
                  })
                  .ok());
  entered.WaitForNotification();
  std::atomic<uint32_t> ran{0};
  for (uint32_t i = 0; i < options_.max_posted; ++i) {
    ASSERT_TRUE(client_->Post([&] { ++ran; }).ok());
  }
  const absl::Status refused = client_->Post([] {});
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("4096 tasks"));
  go_on.Notify();
  while (!client_->Call([] { return absl::OkStatus(); }).ok()) {
    // Refused until the worker has taken the tasks up.
  }
  EXPECT_EQ(ran, options_.max_posted);
}

INSTANTIATE_TEST_SUITE_P(Transports,
                         UcxWorkerTest,
                         ::testing::Values("tcp", "cma,tcp"),
                         [](const auto& parameter) {
                           return std::string(parameter.param) == "tcp" ? "tcp" : "cma";
                         });

TEST(UcxWorkerOptionsTest, UnknownTransportsAndDevicesAreNamed) {
  Recorder handler;
  UcxOptions options;
  options.devices = "nosuchdevice0";
  const auto worker = UcxWorker::Create(options, handler);
  EXPECT_EQ(worker.status().code(), absl::StatusCode::kUnavailable) << worker.status();
  EXPECT_THAT(std::string(worker.status().message()), HasSubstr("nosuchdevice0"));
}

TEST(UcxWorkerOptionsTest, APortInUseAndANameAreRefused) {
  Recorder handler;
  auto first = UcxWorker::Create({}, handler);
  auto second = UcxWorker::Create({}, handler);
  ASSERT_TRUE(first.ok() && second.ok());
  uint16_t port = 0;
  ASSERT_TRUE((*first)
                  ->Call([&] {
                    port = (*first)->Listen("127.0.0.1", 0).value_or(0);
                    return absl::OkStatus();
                  })
                  .ok());
  const absl::Status in_use =
      (*second)->Call([&] { return (*second)->Listen("127.0.0.1", port).status(); });
  EXPECT_FALSE(in_use.ok());
  EXPECT_THAT(std::string(in_use.message()), HasSubstr(std::to_string(port)));
  const absl::Status name =
      (*second)->Call([&] { return (*second)->Listen("localhost", 0).status(); });
  EXPECT_EQ(name.code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace crumb
