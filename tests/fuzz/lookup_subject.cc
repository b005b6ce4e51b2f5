// SPDX-License-Identifier: Apache-2.0
//
// A LookupRequest as the daemon reads it: beside protobuf, whose word counts.
#include <grpcpp/support/byte_buffer.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "daemon/rpc/lookup_message.h"
#include "tests/fuzz/fuzz_check.h"
#include "tests/fuzz/fuzz_subject.h"

namespace crumb {
namespace {

// In two slices, so that fields are cut.
grpc::ByteBuffer BufferOf(std::span<const std::byte> input) {
  const size_t cut = input.size() / 3;
  const grpc::Slice slices[] = {{input.data(), cut}, {input.data() + cut, input.size() - cut}};
  return {slices, 2};
}

FuzzSeed Seed(const std::string& name, const v1::LookupRequest& request) {
  const std::string bytes = request.SerializeAsString();
  const auto* const data = reinterpret_cast<const std::byte*>(bytes.data());
  return {name, {data, data + bytes.size()}};
}

}  // namespace

std::vector<FuzzSeed> FuzzSeeds() {
  v1::LookupRequest request;
  request.set_tokens(std::string("\x01\0\0\0\x02\0\0\0", 8));
  const FuzzSeed least = Seed("least", request);
  request.mutable_session()->set_id(7);
  request.mutable_session()->set_secret(std::string(16, 's'));
  request.set_context_key("lora");
  request.set_allow_int2_window(true);
  const FuzzSeed whole = Seed("whole", request);
  auto* unknown = request.GetReflection()->MutableUnknownFields(&request);
  unknown->AddVarint(100, 7);
  unknown->AddFixed32(101, 7);
  unknown->AddFixed64(102, 7);
  unknown->AddLengthDelimited(103, "seven");
  return {least, whole, Seed("of a later release", request)};
}

bool FuzzOne(std::span<const std::byte> input) {
  v1::LookupRequest expected;
  const bool is_request = expected.ParseFromArray(input.data(), static_cast<int>(input.size()));
  const absl::StatusOr<LookupMessage> found = DecodeLookup(BufferOf(input));
  if (!found.ok()) {
    CheckRefusal(found.status());
    return false;
  }
  if (!found->tokens.ok()) {
    CheckRefusal(found->tokens.status());
    return false;
  }
  Require(is_request, "protobuf sees no LookupRequest in it");
  const std::span<const uint32_t> ids = found->tokens->ids();
  Require(std::string_view(reinterpret_cast<const char*>(ids.data()), ids.size_bytes()) ==
              expected.tokens(),
          "other tokens than protobuf's");
  expected.clear_tokens();
  Require(found->rest.SerializeAsString() == expected.SerializeAsString(),
          "other fields than protobuf's");
  return true;
}

}  // namespace crumb
