// SPDX-License-Identifier: Apache-2.0
#include "daemon/log/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace crumb {
namespace {

TEST(LogTest, TextQuotesOnlyWhatNeedsIt) {
  EXPECT_EQ(FormatLogEvent(LogFormat::kText, "session_attached",
                           {{"session", 7}, {"client", "engine 0"}, {"tenant", "a"}, {"ok", true}}),
            R"(session_attached session=7 client="engine 0" tenant=a ok=true)");
  EXPECT_EQ(FormatLogEvent(LogFormat::kText, "e", {{"empty", ""}}), R"(e empty="")");
}

TEST(LogTest, JsonKeepsNumbersBare) {
  EXPECT_EQ(FormatLogEvent(LogFormat::kJson, "stopped", {{"seconds", 1.5}, {"why", "SIGTERM"}}),
            R"("event":"stopped","seconds":1.5,"why":"SIGTERM")");
}

TEST(LogTest, AClientCannotForgeALineOrAField) {
  const char* forged = "x\nerror fake key=\"1\"\\";
  for (const LogFormat format : {LogFormat::kText, LogFormat::kJson}) {
    const std::string line = FormatLogEvent(format, "e", {{"client", forged}});
    EXPECT_THAT(line, testing::Not(testing::HasSubstr("\n")));
    EXPECT_THAT(line, testing::HasSubstr(R"("x\u000aerror fake key=\"1\"\\")"));
  }
}

TEST(LogTest, StatusIsCodeAndMessage) {
  EXPECT_EQ(FormatLogEvent(LogFormat::kText, "e", {{"status", absl::NotFoundError("no page")}}),
            R"(e status="NOT_FOUND: no page")");
}

}  // namespace
}  // namespace crumb
