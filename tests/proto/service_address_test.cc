// SPDX-License-Identifier: Apache-2.0
#include "proto/base/service_address.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string Refusal(const std::string& address) {
  const absl::Status status = CheckServiceAddress(address);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << address;
  return std::string(status.message());
}

TEST(ServiceAddressTest, SocketsAndPortsAreAddresses) {
  for (const char* address :
       {"unix:/run/crumb/crumbd.sock", "unix:crumbd.sock", "unix:///run/c.sock", "127.0.0.1:7070",
        "[::1]:1", "node-7.example:65535", "ipv4:10.0.0.1:80", "dns:///node:80"}) {
    EXPECT_TRUE(CheckServiceAddress(address).ok()) << CheckServiceAddress(address);
  }
}

TEST(ServiceAddressTest, OthersAreRefusedWithHowToWriteThem) {
  for (const char* address : {"", "crumbd", "node", "node:", ":7070", "node:x", "node:0",
                              "node:65536", "node:-1", "node:70 70"}) {
    EXPECT_THAT(Refusal(address), AllOf(HasSubstr(std::string("\"") + address + "\""),
                                        HasSubstr("unix:PATH"), HasSubstr("HOST:PORT")));
  }
}

TEST(ServiceAddressTest, APathIsToldItsPrefix) {
  EXPECT_THAT(Refusal("/run/crumb/crumbd.sock"), HasSubstr("write unix:/run/crumb/crumbd.sock"));
  EXPECT_THAT(Refusal("./crumbd.sock"), HasSubstr("write unix:./crumbd.sock"));
}

TEST(ServiceAddressTest, PathsThatNoSocketCanHaveAreRefused) {
  EXPECT_THAT(Refusal("unix:"), HasSubstr("names no socket"));
  EXPECT_TRUE(CheckServiceAddress("unix:/" + std::string(106, 'x')).ok());
  EXPECT_THAT(Refusal("unix:/" + std::string(107, 'x')),
              AllOf(HasSubstr("108 bytes"), HasSubstr("allows 107")));
}

}  // namespace
}  // namespace crumb
