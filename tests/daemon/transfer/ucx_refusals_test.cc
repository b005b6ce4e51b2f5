// SPDX-License-Identifier: Apache-2.0
//
// What the UCX data plane must not serve. The daemon is another process, by tcp alone and with cma.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"

#include "tests/daemon/transfer/ucx_server_fixture.h"

namespace crumb::testing {
namespace {

using ::testing::HasSubstr;

TEST_P(UcxServerTest, AWrongSecretAndAForeignSessionAreRefused) {
  Start();
  SessionInfo wrong = session_;
  wrong.secret[3] ^= 1;
  absl::Status status = ConnectUcxWithOptions(options_, wrong, Soon()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated) << status;
  wrong = session_;
  wrong.id = SessionId(987654);
  status = ConnectUcxWithOptions(options_, wrong, Soon()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  ExpectSoon(&TransferProcess::Stats::refused, 2);

  // Another session's lease.
  const SessionInfo other = daemon_->OpenSession(profile_);
  status = Pull(daemon_->Lookup(other, 1, kPages));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("lease"));
}

TEST_P(UcxServerTest, AnotherGenerationAndAPageBeyondTheLeaseAreRefused) {
  Start();
  LeasedPrefix prefix = daemon_->Lookup(session_, 1, kPages);
  prefix.pages[3].int2.generation = Generation(prefix.pages[3].int2.generation.value() + 2);
  absl::Status status = Pull(prefix);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("page 3 is of generation"));

  prefix = daemon_->Lookup(session_, 1, kPages);
  prefix.pages.push_back(prefix.pages.back());
  status = Pull(prefix);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;

  prefix = daemon_->Lookup(session_, 1, kPages);
  prefix.pages[5].bf16 = prefix.pages[5].int2;
  status = Pull(prefix);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
}

TEST_P(UcxServerTest, AnotherGeometryOrNamespaceIsRefused) {
  Start();
  SessionInfo other = session_;
  Geometry geometry = kGeometry;
  geometry.num_layers = 6;
  other.profile = MakeTransferProfile(geometry, kSinkPages);
  transport_ = Connect(other);
  LeasedPrefix prefix = daemon_->Lookup(session_, 1, kPages);
  absl::Status status = Pull(prefix);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;

  transport_ = Connect(session_);
  prefix.namespace_id.bytes[0] ^= 1;
  status = Pull(prefix);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("namespace"));
}

TEST_P(UcxServerTest, AReleasedAndAnExpiredLeaseAreRefused) {
  Start({"lease_ms=200"});
  LeasedPrefix prefix = daemon_->Lookup(session_, 1, kPages);
  daemon_->Ask(absl::StrCat("release ", session_.id.value(), " ", prefix.lease.value()));
  EXPECT_EQ(Pull(prefix).code(), absl::StatusCode::kFailedPrecondition);

  prefix = daemon_->Lookup(session_, 1, kPages);
  ExpectNothingHeld();  // Ends when the lease does.
  EXPECT_EQ(Pull(prefix).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_P(UcxServerTest, TheEndOfASessionEndsItsConnection) {
  Start();
  const LeasedPrefix prefix = daemon_->Lookup(session_, 1, kPages);
  ASSERT_TRUE(Pull(prefix).ok());
  daemon_->Ask(absl::StrCat("end ", session_.id.value()));
  ExpectSoon(&TransferProcess::Stats::peers, 0);
  const absl::Time end = Soon();
  // A new connection of the same session is turned away with the reason. The old one may not have
  // noticed its end yet.
  absl::Status status = Pull(prefix);
  while (status.code() == absl::StatusCode::kUnavailable && Clock::System().Now() < end) {
    status = Pull(prefix);
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  ExpectNothingHeld();
}

TEST_P(UcxServerTest, OneFlippedBitIsDataLoss) {
  Start();
  const LeasedPrefix prefix = daemon_->Lookup(session_, 1, kPages);
  daemon_->Ask("corrupt 1 7");
  const absl::Status status = Pull(prefix);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("page at token 448, KV head 1"));
}

TEST_P(UcxServerTest, AnotherVersionOfUcxIsNamedBeforeConnecting) {
  Start();
  SessionInfo session = session_;
  session.ucx_version = "1.22.0";
  absl::Status status = ConnectUcxWithOptions(options_, session, Soon()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("daemon runs UCX 1.22.0"));
  session.ucx_host.clear();
  status = ConnectUcx(session, Soon()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
}

TEST_P(UcxServerTest, APeerThatSaysNoHelloIsClosed) {
  Start({"hello_timeout_ms=300"});
  class Silent final : public UcxWorker::Handler {
   public:
    bool OnPeer(UcxPeerId) override { return false; }
    void OnMessage(UcxPeerId, UcxMessage&) override {}
    void OnLost(UcxPeerId, const absl::Status&) override { lost_.Notify(); }
    void OnTick(absl::Time) override {}
    absl::Notification lost_;
  } silent;
  auto worker = UcxWorker::Create(options_.ucx, silent);
  ASSERT_TRUE(worker.ok());
  ASSERT_TRUE((*worker)
                  ->Call([&] { return (*worker)->Connect("127.0.0.1", daemon_->port()).status(); })
                  .ok());
  EXPECT_TRUE(silent.lost_.WaitForNotificationWithTimeout(absl::Seconds(20)));
}

}  // namespace
}  // namespace crumb::testing
