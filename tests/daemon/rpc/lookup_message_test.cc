// SPDX-License-Identifier: Apache-2.0
//
// Lookups as bytes, beside protobuf's own reading of them.
#include "daemon/rpc/lookup_message.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "tests/daemon/rpc/rpc_fixture.h"

namespace crumb {
namespace {

// `bytes` in slices of random sizes, as a socket may bring them.
grpc::ByteBuffer Cut(const std::string& bytes, std::mt19937& random) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size();) {
    const size_t size = std::min<size_t>(1 + random() % 3000, bytes.size() - at);
    slices.emplace_back(bytes.data() + at, size);
    at += size;
  }
  return {slices.data(), slices.size()};
}

v1::LookupRequest RandomRequest(std::mt19937& random) {
  v1::LookupRequest request;
  if (random() % 4 != 0) {
    request.mutable_session()->set_id(random());
    request.mutable_session()->set_secret(std::string(16, static_cast<char>(random() % 256)));
  }
  request.set_context_key(std::string(random() % 200, 'k'));
  request.set_allow_int2_window(random() % 2 == 0);
  std::vector<uint32_t> tokens(1 + random() % 5000);
  for (uint32_t& token : tokens) {
    token = static_cast<uint32_t>(random()) >> 1;
  }
  request.set_tokens(Packed(tokens));
  return request;
}

void ExpectSame(const LookupMessage& found, v1::LookupRequest expected) {
  ASSERT_TRUE(found.tokens.ok()) << found.tokens.status();
  const std::span<const uint32_t> ids = found.tokens->ids();
  EXPECT_EQ(Packed({ids.begin(), ids.end()}), expected.tokens());
  expected.clear_tokens();
  EXPECT_EQ(found.rest.SerializeAsString(), expected.SerializeAsString());
}

TEST(LookupMessageTest, IsReadAsProtobufReadsItHoweverItIsCut) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 200; ++round) {
    const v1::LookupRequest request = RandomRequest(random);
    const auto found = DecodeLookup(Cut(request.SerializeAsString(), random));
    ASSERT_TRUE(found.ok()) << found.status();
    ExpectSame(*found, request);
  }
}

TEST(LookupMessageTest, OfSeveralTokensTheLastCountAsInProtobuf) {
  std::mt19937 random(2);
  const v1::LookupRequest first = RandomRequest(random);
  v1::LookupRequest second = RandomRequest(random);
  second.set_allow_int2_window(true);
  const std::string both = first.SerializeAsString() + second.SerializeAsString();
  v1::LookupRequest merged;
  ASSERT_TRUE(merged.ParseFromString(both));
  const auto found = DecodeLookup(Cut(both, random));
  ASSERT_TRUE(found.ok()) << found.status();
  ExpectSame(*found, merged);
}

TEST(LookupMessageTest, FieldsOfALaterReleaseAreNoError) {
  std::mt19937 random(3);
  v1::LookupRequest request = RandomRequest(random);
  auto* unknown = request.GetReflection()->MutableUnknownFields(&request);
  unknown->AddVarint(100, 7);
  unknown->AddFixed32(101, 7);
  unknown->AddFixed64(102, 7);
  unknown->AddLengthDelimited(103, "seven");
  const auto found = DecodeLookup(Cut(request.SerializeAsString(), random));
  ASSERT_TRUE(found.ok()) << found.status();
  ExpectSame(*found, request);
}

TEST(LookupMessageTest, WhateverIsCutOffIsToldAndNothingIsReadBeyond) {
  std::mt19937 random(4);
  const std::string whole = RandomRequest(random).SerializeAsString();
  for (int round = 0; round < 500; ++round) {
    const auto found = DecodeLookup(Cut(whole.substr(0, random() % whole.size()), random));
    if (found.ok() && found->tokens.ok()) {
      // Between two fields protobuf sees no fault either.
      v1::LookupRequest parsed;
      ASSERT_TRUE(parsed.ParseFromString(found->rest.SerializeAsString()));
    } else {
      const absl::Status status = found.ok() ? found->tokens.status() : found.status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    }
  }
}

TEST_F(RpcTest, ALookupThatIsNoLookupRequestIsInvalidAndTheDaemonServesOn) {
  grpc::TemplatedGenericStub<grpc::ByteBuffer, v1::LookupReply> stub(channel_);
  for (const std::string bytes : {"\xff\xff\xff\xff\xff\xff", "\x0b", "\x0a\x7f", "\x1a\xff"}) {
    const grpc::Slice slice(bytes);
    grpc::CompletionQueue queue;
    const auto context = Soon();
    const auto call = stub.PrepareUnaryCall(context.get(), "/crumb.v1.Cache/Lookup",
                                            grpc::ByteBuffer(&slice, 1), &queue);
    call->StartCall();
    v1::LookupReply reply;
    grpc::Status status;
    call->Finish(&reply, &status, nullptr);
    void* tag = nullptr;
    bool is_ok = false;
    ASSERT_TRUE(queue.Next(&tag, &is_ok));
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
    EXPECT_THAT(status.error_message(), testing::HasSubstr("crumb.v1.LookupRequest"));
  }
  EXPECT_TRUE(Attach()->is_attached());
}

}  // namespace
}  // namespace crumb
