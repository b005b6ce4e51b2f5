// SPDX-License-Identifier: Apache-2.0
//
// A commit that was refused is repeated alone: what was staged for it is still there, whichever way
// it came.
#include <algorithm>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"

#include "client/transport/ucx_transport.h"
#include "tests/daemon/rpc/gated_job.h"
#include "tests/daemon/rpc/rpc_fixture.h"

namespace crumb {
namespace {

class RpcCommitRetryTest : public RpcTest, public testing::WithParamInterface<v1::Staging> {
 protected:
  RpcCommitRetryTest()
      : RpcTest([](Config& config) {
          config.demote.max_jobs = 2;
          config.ucx.enabled = true;
          config.ucx.transports = "tcp";
        }) {}
  ~RpcCommitRetryTest() override {
    if (!gate_.HasBeenNotified()) {
      gate_.Notify();  // Else the daemon would wait for it for ever.
    }
  }

  // Hands over a publish of four pages by the way under test; once.
  v1::CommitPublishRequest StageByParam(TestEngine& engine) {
    const v1::BeginPublishReply plan = Begin(engine, Prompt(1, 4));
    if (GetParam() == v1::STAGING_MEMFD) {
      return Stage(engine, plan);
    }
    std::vector<std::byte> staging;
    v1::CommitPublishRequest request = Prepare(engine, plan, &staging);
    request.set_staging(v1::STAGING_UCX);
    const absl::Time deadline = Clock::System().Now() + absl::Seconds(20);
    UcxTransportOptions options;
    options.ucx.transports = "tcp";
    auto transport = ConnectUcxWithOptions(options, InfoOf(engine), deadline);
    EXPECT_TRUE(transport.ok()) << transport.status();
    const OutgoingPage all{PageIdx(0), PageEncoding::kBf16, staging};
    const absl::Status sent =
        (*transport)->SendPages(PublishId(plan.publish_id()), 0, {&all, 1}, deadline);
    EXPECT_TRUE(sent.ok()) << sent;
    return request;  // The connection ends here: nothing can be sent again.
  }
  void FillQueue() {
    WaitForIdleQueue();  // The engine's profile was read there, and counts a moment longer.
    for (uint32_t i = 0; i < server_->config().demote.max_jobs; ++i) {
      const absl::Status status = server_->demote_pool().Submit(std::make_unique<GatedJob>(gate_));
      ASSERT_TRUE(status.ok()) << status;
    }
  }
  void EmptyQueue() {
    gate_.Notify();
    WaitForIdleQueue();
  }
  // The publish has ended. Its staging is missed first where that is its own.
  void ExpectOver(const v1::CommitPublishRequest& request) {
    ExpectStatus(Commit(request),
                 GetParam() == v1::STAGING_UCX ? grpc::StatusCode::FAILED_PRECONDITION
                                               : grpc::StatusCode::NOT_FOUND,
                 {"was committed"});
  }

 private:
  void WaitForIdleQueue() {
    while (server_->demote_pool().num_jobs() != 0) {
      std::this_thread::yield();
    }
  }
  SessionInfo InfoOf(const TestEngine& engine) const {
    SessionInfo info;
    info.id = SessionId(engine.session().id());
    const std::string& secret = engine.session().secret();
    std::copy_n(secret.begin(), info.secret.size(), info.secret.begin());
    info.ucx_host = engine.reply().ucx().host();
    info.ucx_port = engine.reply().ucx().port();
    info.ucx_version = engine.reply().ucx().version();
    info.profile = profile_;
    info.heads = {0, profile_->geometry().num_kv_heads};
    return info;
  }

  absl::Notification gate_;
};

TEST_P(RpcCommitRetryTest, FullQueueIsNamedAndTheCommitAloneSucceedsLater) {
  const auto engine = Attach();
  const v1::CommitPublishRequest request = StageByParam(*engine);
  FillQueue();
  for (int attempt = 0; attempt < 3; ++attempt) {
    ExpectStatus(Commit(request), grpc::StatusCode::RESOURCE_EXHAUSTED,
                 {"demotion queue is full: 2 publishes", "[demote] queue is 2", "threads: 2",
                  "repeat the commit", "[demote] threads or queue"});
  }
  EXPECT_EQ(server_->store().Status().counters.published_pages, 0u) << "nothing is visible";
  EmptyQueue();
  v1::CommitPublishReply reply;
  const grpc::Status status = Commit(request, &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(reply.pages_added(), 4u);
  EXPECT_EQ(server_->store().CheckInvariants(), absl::OkStatus());
  ExpectOver(request);
}

TEST_P(RpcCommitRetryTest, ABadCommitLosesNothingThatWasStaged) {
  const auto engine = Attach();
  const v1::CommitPublishRequest good = StageByParam(*engine);
  v1::CommitPublishRequest bad = good;
  bad.mutable_staged(2)->set_head_crc32c(1, good.staged(2).head_crc32c(1) ^ 1);
  ExpectStatus(Commit(bad), grpc::StatusCode::DATA_LOSS, {"staged page 2", "KV head 1"});
  bad = good;
  bad.mutable_staged(0)->set_staging_offset(uint64_t{1} << 40);
  ExpectInvalid(Commit(bad), {"staged page 0", "beyond the staging memory"});
  const grpc::Status status = Commit(good);
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST_P(RpcCommitRetryTest, AnAbortedPublishCannotBeCommittedAnyMore) {
  const auto engine = Attach();
  const v1::CommitPublishRequest request = StageByParam(*engine);
  FillQueue();
  ExpectStatus(Commit(request), grpc::StatusCode::RESOURCE_EXHAUSTED, {});
  v1::AbortPublishRequest abort;
  *abort.mutable_session() = request.session();
  abort.set_publish_id(request.publish_id());
  v1::AbortPublishReply none;
  EXPECT_TRUE(stub_->AbortPublish(Soon().get(), abort, &none).ok());
  EmptyQueue();
  ExpectOver(request);
}

INSTANTIATE_TEST_SUITE_P(Ways,
                         RpcCommitRetryTest,
                         testing::Values(v1::STAGING_MEMFD, v1::STAGING_UCX),
                         [](const auto& parameter) {
                           return std::string(parameter.param == v1::STAGING_UCX ? "ucx" : "map");
                         });

}  // namespace
}  // namespace crumb
