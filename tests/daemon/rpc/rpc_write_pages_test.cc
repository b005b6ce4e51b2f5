// SPDX-License-Identifier: Apache-2.0
//
// A publish that is written in parts before its commit: what is visible when, and what is left of
// it when a part fails or the engine dies in the middle.
#include <grpcpp/grpcpp.h>

#include <memory>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"

#include "tests/daemon/rpc/gated_job.h"
#include "tests/daemon/rpc/rpc_fixture.h"

namespace crumb {
namespace {

class RpcWritePagesTest : public RpcTest {
 protected:
  RpcWritePagesTest() = default;
  ~RpcWritePagesTest() override {
    if (!gate_.HasBeenNotified()) {
      gate_.Notify();  // Else the daemon would wait for it for ever.
    }
  }

  // All pages of a publish of eight, staged.
  v1::CommitPublishRequest StageEight(TestEngine& engine) {
    return Stage(engine, Begin(engine, Prompt(1, 8)));
  }
  // The pages [first, end) of `all`.
  static v1::WritePagesRequest Part(const v1::CommitPublishRequest& all, int first, int end) {
    v1::WritePagesRequest part;
    *part.mutable_session() = all.session();
    part.set_publish_id(all.publish_id());
    for (int i = first; i < end; ++i) {
      *part.add_staged() = all.staged(i);
    }
    return part;
  }
  static v1::CommitPublishRequest Rest(const v1::CommitPublishRequest& all, int first) {
    v1::CommitPublishRequest rest = all;
    rest.mutable_staged()->DeleteSubrange(0, first);
    return rest;
  }
  grpc::Status Write(const v1::WritePagesRequest& part) {
    v1::WritePagesReply reply;
    return stub_->WritePages(Soon().get(), part, &reply);
  }
  uint32_t Matched(const TestEngine& engine) {
    v1::LookupRequest request;
    *request.mutable_session() = engine.session();
    request.set_tokens(Packed(Prompt(1, 8)));
    v1::LookupReply reply;
    EXPECT_TRUE(Lookup(request, &reply).ok());
    return reply.matched_tokens();
  }
  void ExpectNothingLeft() {
    WaitForIdleQueue();
    StoreStatus status = server_->store().Status();
    for (; status.used_bytes > 0 || status.publishes > 0; status = server_->store().Status()) {
      std::this_thread::yield();  // Until the daemon has noticed; the test's own time limit ends
                                  // it.
    }
    EXPECT_EQ(status.unfinished_bytes, 0u);
    EXPECT_EQ(status.chunk_bytes, 0u);
    EXPECT_EQ(status.counters.published_pages, 0u);
    EXPECT_EQ(server_->store().CheckInvariants(), absl::OkStatus());
  }
  void WaitForIdleQueue() {
    while (server_->demote_pool().num_jobs() != 0) {
      std::this_thread::yield();
    }
  }
  // Nothing is written until OpenGate.
  void CloseGate() {
    WaitForIdleQueue();  // The engine's profile was read there, and counts a moment longer.
    for (uint32_t i = 0; i < server_->config().demote.num_threads; ++i) {
      ASSERT_TRUE(server_->demote_pool().Submit(std::make_unique<GatedJob>(gate_)).ok());
    }
  }
  void OpenGate() { gate_.Notify(); }

 private:
  absl::Notification gate_;
};

TEST_F(RpcWritePagesTest, PartsBecomeVisibleWithTheCommitAndTheirStagingIsFreeBefore) {
  const auto engine = Attach();
  const v1::CommitPublishRequest all = StageEight(*engine);
  ASSERT_EQ(all.staged_size(), 8);
  // In any order, and the staging memory given anew in between.
  ASSERT_TRUE(Write(Part(all, 4, 7)).ok());
  ASSERT_TRUE(Write(Part(all, 0, 2)).ok());
  EXPECT_EQ(Matched(*engine), 0u);
  std::vector<std::byte> staging;
  v1::CommitPublishRequest rest;
  *rest.mutable_session() = engine->session();
  rest.set_publish_id(all.publish_id());
  v1::BeginPublishReply lacking;
  lacking.set_publish_id(all.publish_id());
  for (const uint32_t page : {2u, 3u, 7u}) {
    lacking.add_int2_missing(page);
  }
  engine->GiveStaging(std::vector<std::byte>(100, std::byte{1}));
  rest = Stage(*engine, lacking);
  v1::CommitPublishReply reply;
  const grpc::Status status = Commit(rest, &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(reply.pages_added(), 8u);
  EXPECT_EQ(Matched(*engine), 512u);
  EXPECT_EQ(server_->store().CheckInvariants(), absl::OkStatus());
}

TEST_F(RpcWritePagesTest, CommitOfNothingMakesWhatWasWrittenVisible) {
  const auto engine = Attach();
  const v1::CommitPublishRequest all = StageEight(*engine);
  ASSERT_TRUE(Write(Part(all, 0, 8)).ok());
  EXPECT_EQ(Matched(*engine), 0u);
  EXPECT_TRUE(Commit(Rest(all, 8)).ok());
  EXPECT_EQ(Matched(*engine), 512u);
}

TEST_F(RpcWritePagesTest, PartThatFailsCanBeRepeatedAndIsNotCommittedOtherwise) {
  const auto engine = Attach();
  const v1::CommitPublishRequest all = StageEight(*engine);
  ASSERT_TRUE(Write(Part(all, 0, 3)).ok());
  v1::WritePagesRequest bad = Part(all, 3, 8);
  bad.mutable_staged(1)->set_head_crc32c(1, bad.staged(1).head_crc32c(1) ^ 1);
  ExpectStatus(Write(bad), grpc::StatusCode::DATA_LOSS, {"staged page 4", "KV head 1"});
  ExpectInvalid(Commit(Rest(all, 8)), {"page 3", "was not written"});
  EXPECT_EQ(Matched(*engine), 0u);
  ASSERT_TRUE(Write(Part(all, 3, 8)).ok());
  EXPECT_TRUE(Commit(Rest(all, 8)).ok());
  EXPECT_EQ(Matched(*engine), 512u);
}

TEST_F(RpcWritePagesTest, RefusesNothingAndWhatIsWrittenAlready) {
  const auto engine = Attach();
  const v1::CommitPublishRequest all = StageEight(*engine);
  ExpectInvalid(Write(Part(all, 0, 0)), {"staged is empty"});
  ASSERT_TRUE(Write(Part(all, 0, 3)).ok());
  ExpectInvalid(Write(Part(all, 2, 4)), {"staged page 2", "was not asked for"});
  v1::WritePagesRequest descending = Part(all, 3, 5);
  descending.mutable_staged()->SwapElements(0, 1);
  ExpectInvalid(Write(descending), {"staged page 3", "comes after staged page 4"});
  v1::WritePagesRequest of_none = Part(all, 3, 4);
  of_none.set_publish_id(all.publish_id() + 1);
  ExpectStatus(Write(of_none), grpc::StatusCode::NOT_FOUND, {"no publish"});
  EXPECT_TRUE(Commit(Rest(all, 3)).ok());
}

TEST_F(RpcWritePagesTest, EngineThatDiesBetweenPartsLeavesNothing) {
  const auto engine = Attach();
  const v1::CommitPublishRequest all = StageEight(*engine);
  ASSERT_TRUE(Write(Part(all, 0, 5)).ok());
  EXPECT_GT(server_->store().Status().unfinished_bytes, 0u);
  engine->Break();
  ExpectNothingLeft();
}

TEST_F(RpcWritePagesTest, EngineThatDiesWhileItsPartsWaitAndAreWrittenLeavesNothing) {
  const auto engine = Attach();
  const v1::CommitPublishRequest all = StageEight(*engine);
  ASSERT_TRUE(Write(Part(all, 0, 2)).ok());
  CloseGate();
  std::vector<std::thread> calls;
  std::vector<grpc::Status> answers(2);
  for (const int part : {0, 1}) {
    calls.emplace_back([&, part] {
      answers[static_cast<size_t>(part)] = Write(Part(all, 2 + 3 * part, 5 + 3 * part));
    });
  }
  while (server_->demote_pool().num_jobs() < 4) {
    std::this_thread::yield();
  }
  engine->Break();
  while (server_->store().Status().publishes > 0) {
    std::this_thread::yield();
  }
  EXPECT_GT(server_->store().Status().unfinished_bytes, 0u)
      << "is held as long as it may be written";
  OpenGate();
  for (std::thread& call : calls) {
    call.join();
  }
  for (const grpc::Status& answer : answers) {
    ExpectStatus(answer, grpc::StatusCode::FAILED_PRECONDITION, {"session"});
  }
  ExpectNothingLeft();
}

TEST_F(RpcWritePagesTest, AbortWhileAPartIsWrittenLeavesNothing) {
  const auto engine = Attach();
  const v1::CommitPublishRequest all = StageEight(*engine);
  ASSERT_TRUE(Write(Part(all, 0, 4)).ok());
  CloseGate();
  grpc::Status answer;
  std::thread call([&] { answer = Write(Part(all, 4, 8)); });
  while (server_->demote_pool().num_jobs() < 3) {
    std::this_thread::yield();
  }
  v1::AbortPublishRequest abort;
  *abort.mutable_session() = all.session();
  abort.set_publish_id(all.publish_id());
  v1::AbortPublishReply none;
  EXPECT_TRUE(stub_->AbortPublish(Soon().get(), abort, &none).ok());
  OpenGate();
  call.join();
  ExpectStatus(answer, grpc::StatusCode::NOT_FOUND, {"no publish"});
  ExpectNothingLeft();
}

TEST_F(RpcWritePagesTest, TwoPublishersOfOnePrefixInPartsBothSucceed) {
  const auto one = Attach();
  const auto two = Attach();
  const v1::CommitPublishRequest first = StageEight(*one);
  const v1::CommitPublishRequest second = StageEight(*two);
  ASSERT_TRUE(Write(Part(first, 0, 4)).ok());
  ASSERT_TRUE(Write(Part(second, 0, 6)).ok());
  v1::CommitPublishReply reply;
  ASSERT_TRUE(Commit(Rest(first, 4), &reply).ok());
  EXPECT_EQ(reply.pages_added(), 8u);
  ASSERT_TRUE(Commit(Rest(second, 6), &reply).ok());
  EXPECT_EQ(reply.pages_added(), 0u);
  EXPECT_EQ(reply.pages_present(), 8u);
  EXPECT_EQ(server_->store().CheckInvariants(), absl::OkStatus());
}

}  // namespace
}  // namespace crumb
