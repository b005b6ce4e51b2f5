// SPDX-License-Identifier: Apache-2.0
//
// Each limit of cache.proto's requests, as an engine that breaks it is told.
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "daemon/rpc/request.h"
#include "tests/daemon/rpc/rpc_fixture.h"

namespace crumb {
namespace {

constexpr size_t kMaxTokens = size_t{1} << 20;

TEST_F(RpcTest, LimitsOfAttachNameFieldValueAndLimit) {
  const struct {
    const char* what;
    std::function<void(v1::AttachRequest&)> spoil;
    std::initializer_list<std::string> parts;
  } cases[] = {
      {"no name", [](auto& r) { r.clear_client_name(); }, {"client_name is empty"}},
      {"long name",
       [](auto& r) { r.set_client_name(std::string(129, 'n')); },
       {"client_name has 129 bytes", "at most 128"}},
      {"long tenant",
       [](auto& r) { r.set_tenant(std::string(129, 't')); },
       {"tenant has 129 bytes", "at most 128"}},
      {"odd tenant", [](auto& r) { r.set_tenant("a/../b"); }, {"tenant \"a/../b\"", "A-Z"}},
      {"short id",
       [](auto& r) { r.set_profile_id(std::string(31, 'x')); },
       {"profile_id has 31 bytes", "32"}},
      {"long version",
       [](auto& r) { r.set_library_version(std::string(129, '1')); },
       {"library_version has 129 bytes", "at most 128"}},
      {"no heads", [](auto& r) { r.mutable_heads()->set_first(1); }, {"heads.count is 0"}},
      {"heads beyond the profile's",
       [](auto& r) {
         r.mutable_heads()->set_first(1);
         r.mutable_heads()->set_count(2);
       },
       {"heads [1, +2)", "2 KV heads"}},
  };
  for (const auto& test_case : cases) {
    SCOPED_TRACE(test_case.what);
    v1::AttachRequest request = GoodAttach();
    test_case.spoil(request);
    ExpectInvalid(AttachRefusal(request), test_case.parts);
  }
  EXPECT_TRUE(server_->store().Status().sessions.empty());
  EXPECT_TRUE(Attach()->is_attached()) << "the daemon serves on";
}

// Not sent: it would take gigabytes.
TEST_F(RpcTest, LimitOfProfileFilesIsThatOfTheirReader) {
  v1::AttachRequest request = GoodAttach();
  request.mutable_profile_file()->resize(Profile::kMaxFileBytes);
  EXPECT_TRUE(ParseAttach(request).ok()) << ParseAttach(request).status();
  request.mutable_profile_file()->resize(Profile::kMaxFileBytes + 1);
  const absl::Status status = ParseAttach(request).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(testing::HasSubstr("profile_file has 536870913 bytes"),
                             testing::HasSubstr("at most 536870912"), testing::HasSubstr("fit")));
}

TEST_F(RpcTest, LimitsOfTokensAndContextKeysNameFieldValueAndLimit) {
  const auto engine = Attach();
  std::vector<uint32_t> odd_id = Prompt(1, 1);
  odd_id[5] = 1u << 31;
  const struct {
    std::string tokens;
    std::string context_key;
    std::initializer_list<std::string> parts;
  } cases[] = {
      {"", "", {"tokens is empty"}},
      {std::string(63 * 4 + 3, '\0'), "", {"tokens has 255 bytes", "multiple of 4"}},
      {std::string((kMaxTokens + 64) * 4, '\0'), "", {"tokens has 1048640 ids", "1048576"}},
      {std::string(size_t{10'000'000} * 4, '\0'), "", {"tokens has 10000000 ids", "1048576"}},
      {Packed(odd_id), "", {"tokens[5] is 2147483648", "2147483647"}},
      {Packed(Prompt(1, 1)), std::string(257, 'k'), {"context_key has 257 bytes", "at most 256"}},
  };
  for (const auto& [tokens, context_key, parts] : cases) {
    v1::LookupRequest lookup;
    *lookup.mutable_session() = engine->session();
    lookup.set_tokens(tokens);
    lookup.set_context_key(context_key);
    v1::LookupReply lookup_reply;
    ExpectInvalid(Lookup(lookup, &lookup_reply), parts);

    v1::ProbeRequest probe;
    *probe.mutable_session() = engine->session();
    probe.set_tokens(tokens);
    probe.set_context_key(context_key);
    v1::ProbeReply probe_reply;
    ExpectInvalid(stub_->Probe(Soon().get(), probe, &probe_reply), parts);

    v1::BeginPublishRequest begin;
    *begin.mutable_session() = engine->session();
    begin.set_tokens(tokens);
    begin.set_context_key(context_key);
    v1::BeginPublishReply begin_reply;
    ExpectInvalid(stub_->BeginPublish(Soon().get(), begin, &begin_reply), parts);
  }
  v1::BeginPublishRequest begin;
  *begin.mutable_session() = engine->session();
  begin.set_tokens(std::string(65 * 4, '\0'));
  v1::BeginPublishReply begin_reply;
  ExpectInvalid(stub_->BeginPublish(Soon().get(), begin, &begin_reply),
                {"tokens has 65 ids", "multiple of 64"});
}

TEST_F(RpcTest, ProbeIsOfASessionOrOfANamespace) {
  const auto engine = Attach();
  v1::ProbeRequest request;
  *request.mutable_session() = engine->session();
  request.set_namespace_id(std::string(32, 'n'));
  request.set_tokens(Packed(Prompt(1, 1)));
  v1::ProbeReply reply;
  ExpectInvalid(stub_->Probe(Soon().get(), request, &reply), {"session", "namespace_id"});
  request.clear_session();
  ExpectStatus(stub_->Probe(Soon().get(), request, &reply), grpc::StatusCode::NOT_FOUND, {});
  request.set_namespace_id(std::string(33, 'n'));
  ExpectInvalid(stub_->Probe(Soon().get(), request, &reply), {"namespace_id has 33 bytes", "32"});
}

TEST_F(RpcTest, LimitsOfLeaseListsNameFieldValueAndLimit) {
  const auto engine = Attach();
  v1::RenewLeasesRequest renew;
  v1::ReleaseLeasesRequest release;
  *renew.mutable_session() = engine->session();
  *release.mutable_session() = engine->session();
  for (uint64_t id = 0; id <= 65536; ++id) {
    renew.add_lease_ids(id);
    release.add_lease_ids(id);
  }
  v1::RenewLeasesReply renewed;
  v1::ReleaseLeasesReply released;
  ExpectInvalid(stub_->RenewLeases(Soon().get(), renew, &renewed),
                {"lease_ids has 65537 ids", "at most 65536"});
  ExpectInvalid(stub_->ReleaseLeases(Soon().get(), release, &released),
                {"lease_ids has 65537 ids", "at most 65536"});
}

TEST_F(RpcTest, LimitsOfCommitNameFieldValueAndLimit) {
  const auto engine = Attach();
  const v1::BeginPublishReply plan = Begin(*engine, Prompt(1, 4));
  v1::CommitPublishRequest unstaged;
  *unstaged.mutable_session() = engine->session();
  unstaged.set_publish_id(plan.publish_id());
  unstaged.add_staged()->set_encoding(v1::ENCODING_INT2);
  ExpectStatus(Commit(unstaged), grpc::StatusCode::FAILED_PRECONDITION, {"no staging memory"});

  const v1::CommitPublishRequest good = Stage(*engine, plan);
  const struct {
    std::function<void(v1::CommitPublishRequest&)> spoil;
    std::initializer_list<std::string> parts;
  } cases[] = {
      {[](auto& r) { r.mutable_staged(1)->set_encoding(static_cast<v1::Encoding>(9)); },
       {"staged page 1 has encoding 9", "ENCODING_INT2"}},
      {[](auto& r) { r.mutable_staged(1)->set_encoding(v1::ENCODING_UNSPECIFIED); },
       {"staged page 1 has encoding 0"}},
      {[](auto& r) { r.set_staging(static_cast<v1::Staging>(7)); }, {"staging is 7"}},
      {[](auto& r) { r.mutable_staged(0)->set_staging_offset(~uint64_t{0}); },
       {"staged page 0", "18446744073709551615", "beyond the staging memory"}},
      {[](auto& r) { r.mutable_staged(0)->add_head_crc32c(1); }, {"3 checksums for 2 KV heads"}},
      {[](auto& r) { r.mutable_staged(3)->set_page_idx(900); }, {"staged page 900", "not asked"}},
      {[](auto& r) { r.mutable_staged()->RemoveLast(); }, {"3"}},
      {[](auto& r) {
         for (int i = 0; i <= 32768; ++i) {
           r.add_staged();
         }
       },
       {"staged has 32773 pages", "at most 32768"}},
  };
  for (const auto& test_case : cases) {
    v1::CommitPublishRequest request = good;
    test_case.spoil(request);
    ExpectInvalid(Commit(request), test_case.parts);
  }
  v1::CommitPublishRequest ucx = good;
  ucx.set_staging(v1::STAGING_UCX);
  ExpectStatus(Commit(ucx), grpc::StatusCode::FAILED_PRECONDITION, {"[ucx] enabled"});
  v1::CommitPublishRequest unknown = good;
  unknown.set_publish_id(12345);
  ExpectStatus(Commit(unknown), grpc::StatusCode::NOT_FOUND, {"12345"});
  EXPECT_TRUE(Commit(good).ok()) << "after all this the publish can still be committed";
}

}  // namespace
}  // namespace crumb
