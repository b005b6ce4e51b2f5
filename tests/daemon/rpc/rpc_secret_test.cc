// SPDX-License-Identifier: Apache-2.0
//
// A session's id is known to all who may ask for the daemon's status, and easy to guess. What it
// owns answers to its secret alone.
#include <string>
#include <vector>

#include "proto/crumb/v1/admin.grpc.pb.h"
#include "tests/daemon/rpc/rpc_fixture.h"

namespace crumb {
namespace {

class RpcSecretTest : public RpcTest {
 protected:
  // What a thief can say of `engine`: its id, and a secret that is not its own.
  std::vector<v1::SessionKey> Forgeries(const TestEngine& engine) const {
    v1::SessionKey none;
    none.set_id(engine.session().id());
    v1::SessionKey off_by_a_bit = engine.session();
    off_by_a_bit.mutable_secret()->back() ^= 1;
    v1::SessionKey of_the_thief = thief_->session();
    of_the_thief.set_id(engine.session().id());
    return {none, off_by_a_bit, of_the_thief};
  }
  static void ExpectRefused(const grpc::Status& status) {
    ExpectStatus(status, grpc::StatusCode::UNAUTHENTICATED, {"secret", "AttachReply"});
  }

  v1::LookupReply Hit() {
    v1::LookupRequest request;
    *request.mutable_session() = owner_->session();
    request.set_tokens(Packed(Prompt(1, 5)));
    v1::LookupReply found;
    EXPECT_TRUE(Lookup(request, &found).ok());
    EXPECT_NE(found.lease_id(), 0u);
    return found;
  }

  const std::unique_ptr<TestEngine> owner_ = Attach();
  const std::unique_ptr<TestEngine> thief_ = Attach();
};

TEST_F(RpcSecretTest, LeasesAreRenewedAndReleasedByTheirOwnerAlone) {
  ASSERT_TRUE(Commit(Stage(*owner_, Begin(*owner_, Prompt(1, 4)))).ok());
  const uint64_t lease = Hit().lease_id();
  v1::RenewLeasesRequest renew;
  v1::ReleaseLeasesRequest release;
  renew.add_lease_ids(lease);
  release.add_lease_ids(lease);
  v1::RenewLeasesReply renewed;
  v1::ReleaseLeasesReply released;
  for (const v1::SessionKey& forgery : Forgeries(*owner_)) {
    *renew.mutable_session() = forgery;
    *release.mutable_session() = forgery;
    ExpectRefused(stub_->RenewLeases(Soon().get(), renew, &renewed));
    ExpectRefused(stub_->ReleaseLeases(Soon().get(), release, &released));
  }
  // In its own name the thief holds no such lease.
  *renew.mutable_session() = thief_->session();
  ASSERT_TRUE(stub_->RenewLeases(Soon().get(), renew, &renewed).ok());
  EXPECT_EQ(renewed.ended_lease_ids_size(), 1);
  *release.mutable_session() = thief_->session();
  EXPECT_TRUE(stub_->ReleaseLeases(Soon().get(), release, &released).ok());
  EXPECT_EQ(server_->store().Status().leases, 1u);

  *release.mutable_session() = owner_->session();
  EXPECT_TRUE(stub_->ReleaseLeases(Soon().get(), release, &released).ok());
  EXPECT_EQ(server_->store().Status().leases, 0u);
}

TEST_F(RpcSecretTest, PublishesAreCommittedAndAbortedByTheirOwnerAlone) {
  const v1::CommitPublishRequest good = Stage(*owner_, Begin(*owner_, Prompt(1, 4)));
  v1::AbortPublishRequest abort;
  abort.set_publish_id(good.publish_id());
  v1::AbortPublishReply aborted;
  for (const v1::SessionKey& forgery : Forgeries(*owner_)) {
    v1::CommitPublishRequest commit = good;
    *commit.mutable_session() = forgery;
    ExpectRefused(Commit(commit));
    *abort.mutable_session() = forgery;
    ExpectRefused(stub_->AbortPublish(Soon().get(), abort, &aborted));
  }
  *abort.mutable_session() = thief_->session();
  ExpectStatus(stub_->AbortPublish(Soon().get(), abort, &aborted), grpc::StatusCode::NOT_FOUND,
               {std::to_string(good.publish_id())});
  EXPECT_EQ(server_->store().Status().counters.published_pages, 0u);
  EXPECT_TRUE(Commit(good).ok()) << "nothing of it was lost";
}

TEST_F(RpcSecretTest, PrefixesAreFoundAndPublishedInNoOneElsesName) {
  for (const v1::SessionKey& forgery : Forgeries(*owner_)) {
    v1::LookupRequest lookup;
    *lookup.mutable_session() = forgery;
    lookup.set_tokens(Packed(Prompt(1, 4)));
    v1::LookupReply found;
    ExpectRefused(Lookup(lookup, &found));

    v1::ProbeRequest probe;
    *probe.mutable_session() = forgery;
    probe.set_tokens(Packed(Prompt(1, 4)));
    v1::ProbeReply probed;
    ExpectRefused(stub_->Probe(Soon().get(), probe, &probed));

    v1::BeginPublishRequest begin;
    *begin.mutable_session() = forgery;
    begin.set_tokens(Packed(Prompt(1, 4)));
    v1::BeginPublishReply begun;
    ExpectRefused(stub_->BeginPublish(Soon().get(), begin, &begun));
  }
  EXPECT_EQ(server_->store().Status().publishes, 0u);
}

TEST_F(RpcSecretTest, StatusShowsIdsAndNoSecrets) {
  v1::GetStatusReply status;
  ASSERT_TRUE(v1::Admin::NewStub(channel_)->GetStatus(Soon().get(), {}, &status).ok());
  EXPECT_EQ(status.sessions_size(), 2);
  EXPECT_EQ(status.SerializeAsString().find(owner_->session().secret()), std::string::npos);
  EXPECT_NE(owner_->session().secret(), thief_->session().secret());
}

}  // namespace
}  // namespace crumb
