// SPDX-License-Identifier: Apache-2.0
//
// Sessions and publishes over the control plane, from the engine's side and the store's.
#include <grpcpp/generic/generic_stub.h>

#include <future>
#include <string>
#include <thread>
#include <utility>

#include "tests/daemon/rpc/rpc_fixture.h"

namespace crumb {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// HealthCheckResponse{status}, as bytes: its protobuf is not among gRPC's installed headers.
constexpr char kServing[] = "\x08\x01";
constexpr char kNotServing[] = "\x08\x02";

// What the health service says of the whole server.
std::string Health(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::GenericStub stub(channel);
  const auto context = Soon();
  const grpc::Slice nothing;  // An empty HealthCheckRequest.
  const grpc::ByteBuffer request(&nothing, 1);
  grpc::ByteBuffer reply;
  std::promise<grpc::Status> done;
  stub.UnaryCall(context.get(), "/grpc.health.v1.Health/Check", grpc::StubOptions(), &request,
                 &reply, [&done](grpc::Status status) { done.set_value(std::move(status)); });
  const grpc::Status status = done.get_future().get();
  EXPECT_TRUE(status.ok()) << status.error_message();
  grpc::Slice bytes;
  EXPECT_TRUE(reply.DumpToSingleSlice(&bytes).ok());
  return {bytes.begin(), bytes.end()};
}

TEST_F(RpcTest, UnknownProfileIsAskedForOnceAndThenKnownById) {
  v1::AttachRequest by_id = GoodAttach();
  by_id.clear_profile_file();
  ExpectStatus(AttachRefusal(by_id), grpc::StatusCode::NOT_FOUND,
               {profile_->id().Short(), "profile_file"});
  { const auto first = Attach(); }
  const TestEngine second(*stub_, by_id);
  EXPECT_TRUE(second.is_attached()) << second.status().error_message();
}

TEST_F(RpcTest, ProfileFileOfAnotherHashIsRefusedWithBothHashes) {
  const auto other = MakeTestProfile({.seed = 2});
  v1::AttachRequest request = GoodAttach();
  request.set_profile_file(other->file().data(), other->file().size());
  ExpectInvalid(AttachRefusal(request), {other->id().Short(), profile_->id().Short()});
  request.set_profile_file("no profile at all");
  ExpectInvalid(AttachRefusal(request), {});
}

TEST_F(RpcTest, CallsOfNoSessionAreToldToAttach) {
  v1::LookupRequest request;
  request.mutable_session()->set_id(4711);
  request.mutable_session()->set_secret(std::string(16, 's'));
  request.set_tokens(Packed(Prompt(1, 1)));
  v1::LookupReply reply;
  ExpectStatus(Lookup(request, &reply), grpc::StatusCode::FAILED_PRECONDITION, {"4711"});
}

TEST_F(RpcTest, SecondAttachRequestOnAStreamEndsItAndItsSession) {
  const auto engine = Attach();
  ExpectInvalid(engine->AttachAgain(GoodAttach()), {"second AttachRequest"});
  EXPECT_TRUE(server_->store().Status().sessions.empty());
}

TEST_F(RpcTest, PublishedPrefixIsFoundUnderALease) {
  const auto engine = Attach();
  const v1::BeginPublishReply plan = Begin(*engine, Prompt(1, 4));
  EXPECT_THAT(plan.int2_missing(), ElementsAre(1, 2, 3));
  EXPECT_THAT(plan.bf16_missing(), ElementsAre(0, 2, 3)) << "the sink and the tail";
  v1::CommitPublishReply committed;
  const grpc::Status status = Commit(Stage(*engine, plan), &committed);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(committed.pages_added(), 4u);
  EXPECT_EQ(committed.pages_present(), 0u);

  v1::LookupRequest request;
  *request.mutable_session() = engine->session();
  request.set_tokens(Packed(Prompt(1, 5)));
  v1::LookupReply found;
  ASSERT_TRUE(Lookup(request, &found).ok());
  EXPECT_EQ(found.matched_tokens(), 4 * kPageTokens);
  EXPECT_NE(found.lease_id(), 0u);
  EXPECT_EQ(found.lease_ms(), 30000u);
  EXPECT_EQ(static_cast<uint32_t>(found.pages().int2_chunk_size()),
            found.usable_tokens() / kPageTokens);
}

TEST_F(RpcTest, WrongChecksumIsDataLossAndTheCommitMayBeTriedAgain) {
  const auto engine = Attach();
  const v1::CommitPublishRequest good = Stage(*engine, Begin(*engine, Prompt(1, 4)));
  v1::CommitPublishRequest bad = good;
  bad.mutable_staged(2)->set_head_crc32c(1, good.staged(2).head_crc32c(1) ^ 1);
  ExpectStatus(Commit(bad), grpc::StatusCode::DATA_LOSS, {"staged page 2", "KV head 1"});
  EXPECT_EQ(server_->store().Status().counters.published_pages, 0u) << "nothing is visible";
  EXPECT_TRUE(Commit(good).ok());
}

TEST_F(RpcTest, TwoPublishersOfOnePrefixBothSucceed) {
  const auto first = Attach();
  const auto second = Attach();
  const v1::BeginPublishReply first_plan = Begin(*first, Prompt(1, 4));
  const v1::BeginPublishReply second_plan = Begin(*second, Prompt(1, 4));
  const v1::CommitPublishRequest first_request = Stage(*first, first_plan);
  const v1::CommitPublishRequest second_request = Stage(*second, second_plan);
  v1::CommitPublishReply replies[2];
  grpc::Status first_status;
  std::thread other([&] { first_status = Commit(first_request, &replies[0]); });
  const grpc::Status second_status = Commit(second_request, &replies[1]);
  other.join();
  EXPECT_TRUE(first_status.ok()) << first_status.error_message();
  EXPECT_TRUE(second_status.ok()) << second_status.error_message();
  EXPECT_EQ(replies[0].pages_added() + replies[1].pages_added(), 4u);
  EXPECT_EQ(replies[0].pages_present() + replies[1].pages_present(), 4u);
  EXPECT_EQ(server_->store().CheckInvariants(), absl::OkStatus());
  // A third finds all of it there.
  const v1::BeginPublishReply third = Begin(*first, Prompt(1, 4));
  EXPECT_EQ(third.int2_missing_size() + third.bf16_missing_size(), 0);
}

class RpcTwoSessionsTest : public RpcTest {
 protected:
  RpcTwoSessionsTest() : RpcTest([](Config& config) { config.store.max_sessions = 2; }) {}
};

TEST_F(RpcTwoSessionsTest, SessionBeyondTheLimitIsRefusedUntilAnotherEnds) {
  const auto first = Attach();
  const auto second = Attach();
  ExpectStatus(AttachRefusal(GoodAttach()), grpc::StatusCode::RESOURCE_EXHAUSTED,
               {"2 are attached, of at most 2", "detach", "[store] max_sessions"});
  EXPECT_EQ(server_->store().Status().sessions.size(), 2u) << "who was refused takes no place";
  v1::LookupRequest request;
  *request.mutable_session() = second->session();
  request.set_tokens(Packed(Prompt(1, 1)));
  v1::LookupReply found;
  EXPECT_TRUE(Lookup(request, &found).ok()) << "those that are attached go on";

  first->Break();
  const absl::Time broken = absl::Now();
  while (server_->store().Status().sessions.size() > 1 &&
         absl::Now() < broken + absl::Seconds(20)) {
    std::this_thread::yield();
  }
  const auto third = Attach();
  EXPECT_NE(third->session().id(), first->session().id()) << "ids are not used again";
  EXPECT_FALSE(AttachRefusal(GoodAttach()).ok());
}

TEST_F(RpcTest, BrokenStreamEndsTheSessionAndAllItHeld) {
  const auto engine = Attach();
  ASSERT_TRUE(Commit(Stage(*engine, Begin(*engine, Prompt(1, 4)))).ok());
  v1::LookupRequest request;
  *request.mutable_session() = engine->session();
  request.set_tokens(Packed(Prompt(1, 5)));
  v1::LookupReply found;
  ASSERT_TRUE(Lookup(request, &found).ok());
  Begin(*engine, Prompt(2, 4));  // Left unfinished.
  ASSERT_EQ(server_->store().Status().publishes, 1u);

  engine->Break();
  const absl::Time broken = absl::Now();
  while (!server_->store().Status().sessions.empty() && absl::Now() < broken + absl::Seconds(20)) {
    std::this_thread::yield();
  }
  const StoreStatus status = server_->store().Status();
  EXPECT_TRUE(status.sessions.empty());
  EXPECT_EQ(status.publishes, 0u);
  EXPECT_EQ(status.leases, 0u);
  EXPECT_EQ(status.quarantined_leases, 1u) << "its reader may not know yet";
  ExpectStatus(Lookup(request, &found), grpc::StatusCode::FAILED_PRECONDITION, {"attach"});
  EXPECT_EQ(server_->store().CheckInvariants(), absl::OkStatus());
}

TEST_F(RpcTest, EngineThatDiesWhileItAttachesLeavesNoSession) {
  for (uint32_t seed = 10; seed < 30; ++seed) {
    const auto unknown = MakeTestProfile({.seed = seed});
    v1::AttachRequest request = GoodAttach();
    request.set_profile_id(unknown->id().bytes.data(), Digest::kBytes);
    request.set_profile_file(unknown->file().data(), unknown->file().size());
    const auto context = Soon();
    const auto stream = stub_->Attach(context.get());
    EXPECT_TRUE(stream->Write(request));
    context->TryCancel();  // Before, while or after its profile is parsed.
    stream->Finish();
  }
  server_->Drain();
  EXPECT_TRUE(server_->store().Status().sessions.empty());
}

TEST_F(RpcTest, DrainTellsTheSessionsAndLetsThemFinishWhatTheyBegan) {
  const auto engine = Attach();
  const v1::CommitPublishRequest commit = Stage(*engine, Begin(*engine, Prompt(1, 4)));
  EXPECT_EQ(Health(channel_), kServing);
  std::thread drain([this] { server_->Drain(); });
  v1::AttachReply news;
  ASSERT_TRUE(engine->ReadNews(&news));
  EXPECT_TRUE(news.draining());
  EXPECT_EQ(Health(channel_), kNotServing);
  v1::LookupRequest request;
  *request.mutable_session() = engine->session();
  request.set_tokens(Packed(Prompt(1, 5)));
  v1::LookupReply found;
  ExpectStatus(Lookup(request, &found), grpc::StatusCode::UNAVAILABLE, {"drain"});
  const grpc::Status status = Commit(commit);
  EXPECT_TRUE(status.ok()) << status.error_message();
  drain.join();
  EXPECT_FALSE(engine->ReadNews(&news)) << "the stream has ended";
  EXPECT_FALSE(std::filesystem::exists(directory_ / "crumbd.sock"));
}

TEST_F(RpcTest, HealthIsServing) {
  EXPECT_EQ(Health(channel_), kServing);
}

TEST_F(RpcTest, ReflectionListsTheServices) {
  grpc::GenericStub stub(channel_);
  grpc::CompletionQueue queue;
  const auto context = Soon();
  const auto call = stub.PrepareCall(
      context.get(), "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  const auto next_is_ok = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  call->StartCall(nullptr);
  ASSERT_TRUE(next_is_ok());
  const grpc::Slice list_services(std::string("\x3a\x01*"));  // list_services: "*".
  call->Write(grpc::ByteBuffer(&list_services, 1), nullptr);
  ASSERT_TRUE(next_is_ok());
  grpc::ByteBuffer reply;
  call->Read(&reply, nullptr);
  ASSERT_TRUE(next_is_ok());
  grpc::Slice bytes;
  ASSERT_TRUE(reply.DumpToSingleSlice(&bytes).ok());
  const std::string text(bytes.begin(), bytes.end());
  EXPECT_THAT(text, HasSubstr("crumb.v1.Cache"));
  EXPECT_THAT(text, HasSubstr("crumb.v1.Admin"));
  EXPECT_THAT(text, HasSubstr("grpc.health.v1.Health"));
  context->TryCancel();
  grpc::Status status;
  call->Finish(&status, nullptr);
  EXPECT_TRUE(next_is_ok());
  queue.Shutdown();
}

}  // namespace
}  // namespace crumb
