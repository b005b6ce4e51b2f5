// SPDX-License-Identifier: Apache-2.0
#include "client/session/lookup_stub.h"

#include <initializer_list>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace crumb {
namespace {

std::string Encoded(const v1::LookupRequest& rest, const std::vector<uint32_t>& tokens) {
  grpc::Slice slice;
  EXPECT_TRUE(EncodeLookup(rest, tokens).DumpToSingleSlice(&slice).ok());
  return {reinterpret_cast<const char*>(slice.begin()), slice.size()};
}

TEST(LookupStubTest, WhatItWritesIsReadByProtobuf) {
  v1::LookupRequest rest;
  rest.mutable_session()->set_id(7);
  rest.mutable_session()->set_secret(std::string(16, 's'));
  rest.set_context_key("adapter");
  rest.set_allow_int2_window(true);
  for (const size_t num_tokens : std::initializer_list<size_t>{0, 1, 31, 32, 100'000}) {
    std::vector<uint32_t> tokens(num_tokens);
    for (size_t i = 0; i < num_tokens; ++i) {
      tokens[i] = static_cast<uint32_t>(i * 2654435761u) >> 1;
    }
    v1::LookupRequest parsed;
    ASSERT_TRUE(parsed.ParseFromString(Encoded(rest, tokens)));
    EXPECT_EQ(parsed.tokens(), std::string(reinterpret_cast<const char*>(tokens.data()),
                                           num_tokens * sizeof(uint32_t)));
    parsed.clear_tokens();
    EXPECT_EQ(parsed.SerializeAsString(), rest.SerializeAsString());
  }
}

}  // namespace
}  // namespace crumb
