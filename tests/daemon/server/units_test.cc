// SPDX-License-Identifier: Apache-2.0
#include "daemon/server/units.h"

#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace crumb {
namespace {

using testing::HasSubstr;

TEST(UnitsTest, SizesAreBytesOrBinaryUnits) {
  EXPECT_EQ(*ParseBytes("0"), 0u);
  EXPECT_EQ(*ParseBytes("4096"), 4096u);
  EXPECT_EQ(*ParseBytes("512KiB"), 512u << 10);
  EXPECT_EQ(*ParseBytes("64MiB"), 64u << 20);
  EXPECT_EQ(*ParseBytes("4GiB"), uint64_t{4} << 30);
  EXPECT_EQ(*ParseBytes("1TiB"), uint64_t{1} << 40);
}

TEST(UnitsTest, OtherSizesAreRefusedWithTheValueAndHowToWriteIt) {
  for (const char* text :
       {"", "4GB", "4G", "4 GiB", "-1", "+1", "1.5GiB", "GiB", "4gib", "0x10", "4GiBKiB"}) {
    const absl::Status status = ParseBytes(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("\"", text, "\""))) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr("as in 4GiB")) << text;
  }
}

TEST(UnitsTest, SizesEndWhereSignedOnesDo) {
  EXPECT_EQ(*ParseBytes("9223372036854775807"), uint64_t{std::numeric_limits<int64_t>::max()});
  EXPECT_FALSE(ParseBytes("9223372036854775808").ok());
  EXPECT_FALSE(ParseBytes("18446744073709551616").ok());
  EXPECT_TRUE(ParseBytes("8388607TiB").ok());
  EXPECT_FALSE(ParseBytes("8388608TiB").ok());
}

TEST(UnitsTest, FormattedSizesAreShortAndReadBack) {
  EXPECT_EQ(FormatBytes(0), "0");
  EXPECT_EQ(FormatBytes(1023), "1023");
  EXPECT_EQ(FormatBytes(1536), "1536");
  EXPECT_EQ(FormatBytes(3 << 10), "3KiB");
  EXPECT_EQ(FormatBytes(uint64_t{4} << 30), "4GiB");
  for (const uint64_t bytes : {uint64_t{1}, uint64_t{1} << 20, (uint64_t{1} << 40) + 1,
                               uint64_t{5} << 40, uint64_t{1} << 62}) {
    EXPECT_EQ(*ParseBytes(FormatBytes(bytes)), bytes);
  }
}

TEST(UnitsTest, TimesArePositiveAndFinite) {
  EXPECT_EQ(*ParseDurationText("500ms"), absl::Milliseconds(500));
  EXPECT_EQ(*ParseDurationText("1h30m"), absl::Minutes(90));
  for (const char* text : {"", "0", "0s", "-1s", "inf", "30", "30 s", "s", "30sec"}) {
    const absl::Status status = ParseDurationText(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr("as in 30s")) << text;
  }
}

TEST(UnitsTest, ModesAreOctalPermissions) {
  EXPECT_EQ(*ParseMode("0660"), 0660u);
  EXPECT_EQ(*ParseMode("600"), 0600u);
  EXPECT_EQ(FormatMode(0660), "0660");
  EXPECT_EQ(FormatMode(07), "0007");
  for (const char* text : {"", "0o660", "rw-rw----", "0680", "1777", "-660"}) {
    EXPECT_EQ(ParseMode(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(UnitsTest, NumbersKeepToTheirBoundsAndNameThem) {
  EXPECT_EQ(*ParseNumber("1", 1, 10), 1u);
  EXPECT_EQ(*ParseNumber("10", 1, 10), 10u);
  for (const char* text : {"", "0", "11", "-1", "1.0", "ten", "99999999999999999999"}) {
    EXPECT_THAT(std::string(ParseNumber(text, 1, 10).status().message()),
                HasSubstr("whole number from 1 to 10"))
        << text;
  }
}

TEST(UnitsTest, FlagsAreTrueOrFalse) {
  EXPECT_TRUE(*ParseFlag("true"));
  EXPECT_FALSE(*ParseFlag("false"));
  for (const char* text : {"", "yes", "1", "True"}) {
    EXPECT_FALSE(ParseFlag(text).ok()) << text;
  }
}

TEST(UnitsTest, AddressesAreHostAndPort) {
  const auto v4 = ParseHostPort("127.0.0.1:7070");
  ASSERT_TRUE(v4.ok()) << v4.status();
  EXPECT_EQ(v4->host, "127.0.0.1");
  EXPECT_EQ(v4->port, 7070);
  const auto v6 = ParseHostPort("[::1]:0");
  ASSERT_TRUE(v6.ok()) << v6.status();
  EXPECT_EQ(v6->host, "::1");
  EXPECT_EQ(v6->port, 0);
  EXPECT_EQ(ParseHostPort("localhost:65535")->port, 65535);
  for (const char* text : {"", "localhost", ":7070", "localhost:", "localhost:65536", "::1:7070",
                           "[]:7070", "localhost:http", "localhost:-1"}) {
    EXPECT_THAT(std::string(ParseHostPort(text).status().message()), HasSubstr("host:port"))
        << text;
  }
}

TEST(UnitsTest, LoopbackIsAnAddressOfThisMachineAndNoNameThatLooksLikeOne) {
  for (const char* host : {"127.0.0.1", "127.255.1.2", "::1", "localhost"}) {
    EXPECT_TRUE(IsLoopback(host)) << host;
  }
  for (const char* host : {"", "0.0.0.0", "::", "10.0.0.1", "128.0.0.1", "127.example.com", "127.",
                           "127.0.0.1.example.com", "localhost.example.com"}) {
    EXPECT_FALSE(IsLoopback(host)) << host;
  }
}

}  // namespace
}  // namespace crumb
