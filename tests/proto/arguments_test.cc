// SPDX-License-Identifier: Apache-2.0
#include "proto/base/arguments.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace crumb {
namespace {

using testing::StartsWith;

absl::Status Check(const std::vector<const char*>& arguments) {
  std::vector<const char*> argv = {"program"};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  return CheckFlagsHaveValues(static_cast<int>(argv.size()), argv.data());
}

TEST(ArgumentsTest, FlagsWithoutAValueBehindTheirSignAreNamed) {
  const absl::Status status = Check({"status", "--address=", "--json"});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), StartsWith("--address= has an empty value"));
}

TEST(ArgumentsTest, AllElseIsLeftToTheParser) {
  EXPECT_TRUE(Check({}).ok());
  EXPECT_TRUE(
      Check({"--json", "--address=a", "--address", "", "-", "-a", "=", "x=", "--a=b="}).ok());
  EXPECT_TRUE(Check({"--prompt==", "--", "--address="}).ok());
}

}  // namespace
}  // namespace crumb
