// SPDX-License-Identifier: Apache-2.0
//
// What an engine may not ask of Client::Create. No daemon is needed to be told.
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "crumb/client.h"
#include "tests/support/test_profile.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(ClientOptionsTest, EachThatCannotBeIsNamedWithItsValueAndLimit) {
  const ClientOptions good{.address = "unix:/nowhere/crumbd.sock", .profile = MakeTestProfile()};
  const auto refusal = [&](auto change) {
    ClientOptions options = good;
    change(options);
    const auto client = Client::Create(options);
    EXPECT_EQ(client.status().code(), absl::StatusCode::kInvalidArgument) << client.status();
    return std::string(client.status().message());
  };
  EXPECT_THAT(refusal([](auto& o) { o.profile = nullptr; }),
              AllOf(HasSubstr("ClientOptions::profile"), HasSubstr("load")));
  EXPECT_THAT(refusal([](auto& o) { o.address = ""; }),
              AllOf(HasSubstr("ClientOptions::address"), HasSubstr("unix:PATH")));
  EXPECT_THAT(refusal([](auto& o) { o.address = "/run/crumb/crumbd.sock"; }),
              AllOf(HasSubstr("ClientOptions::address"), HasSubstr("write unix:/run/crumb")));
  EXPECT_THAT(refusal([](auto& o) { o.client_name = ""; }),
              AllOf(HasSubstr("ClientOptions::client_name has 0 bytes"), HasSubstr("1 to 128")));
  EXPECT_THAT(refusal([](auto& o) { o.client_name = std::string(129, 'n'); }),
              HasSubstr("has 129 bytes"));
  EXPECT_THAT(refusal([](auto& o) { o.client_name = "\xff"; }), HasSubstr("in UTF-8"));
  EXPECT_THAT(refusal([](auto& o) { o.heads = {.first = 1, .count = 2}; }),
              AllOf(HasSubstr("ClientOptions::heads"), HasSubstr("2 KV heads")));
  EXPECT_THAT(refusal([](auto& o) { o.reconnect_backoff_max = absl::ZeroDuration(); }),
              HasSubstr("ClientOptions::reconnect_backoff_max"));
  EXPECT_TRUE(Client::Create(good).ok());
}

}  // namespace
}  // namespace crumb
