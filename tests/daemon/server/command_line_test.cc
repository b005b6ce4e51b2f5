// SPDX-License-Identifier: Apache-2.0
#include "daemon/server/command_line.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "daemon/server/config_file.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class CommandLineTest : public testing::Test {
 protected:
  CommandLineTest() { std::ofstream(file_) << "[store]\ncapacity = \"1GiB\"\nlease = \"7s\"\n"; }
  ~CommandLineTest() override { std::filesystem::remove(file_); }

  static absl::StatusOr<CommandLine> Parse(const std::vector<std::string>& arguments) {
    std::vector<const char*> argv = {"crumbd"};
    for (const std::string& argument : arguments) {
      argv.push_back(argument.c_str());
    }
    return ParseCommandLine(static_cast<int>(argv.size()), argv.data());
  }
  static std::string Refusal(const std::vector<std::string>& arguments) {
    const auto line = Parse(arguments);
    EXPECT_EQ(line.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(line.status().message());
  }

  const std::string file_ = (std::filesystem::path(testing::TempDir()) /
                             absl::StrCat("command_line_test.", getpid(), ".toml"))
                                .string();
};

TEST_F(CommandLineTest, FlagsOverrideTheFileAndTheFileTheDefaults) {
  const auto line = Parse({"--store.capacity=2GiB", "--config", file_});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->config.store.capacity_bytes, size_t{2} << 30);
  EXPECT_EQ(line->config.store.lease, absl::Seconds(7));
  EXPECT_EQ(line->config.store.chunk_bytes, Config().store.chunk_bytes);
  EXPECT_EQ(line->text, "");
}

TEST_F(CommandLineTest, EveryKeyIsAFlagThatTakesItsDefault) {
  for (const ConfigKey& key : ConfigKeys()) {
    const std::string path(key.path);
    const auto line = Parse({absl::StrCat("--", path, "=", key.get(Config()))});
    ASSERT_TRUE(line.ok()) << path << ": " << line.status();
    EXPECT_EQ(key.get(line->config), key.get(Config())) << path;
  }
}

TEST_F(CommandLineTest, UnknownFlagNamesTheNearest) {
  EXPECT_THAT(
      Refusal({"--store.capcity=4GiB"}),
      AllOf(HasSubstr("--store.capcity=4GiB"), HasSubstr("did you mean --store.capacity?")));
  EXPECT_THAT(Refusal({"--confg=x"}), HasSubstr("did you mean --config?"));
  EXPECT_THAT(Refusal({"something-else-entirely"}),
              AllOf(HasSubstr("--help"), Not(HasSubstr("did you mean"))));
}

TEST_F(CommandLineTest, BadValueNamesTheFlag) {
  EXPECT_THAT(Refusal({"--store.capacity=4GB"}),
              AllOf(HasSubstr("--store.capacity"), HasSubstr("\"4GB\"")));
  EXPECT_THAT(Refusal({"--listen.insecure=yes"}), HasSubstr("write true or false"));
}

TEST_F(CommandLineTest, FlagWithoutAValueTakesNoOtherFlagForIt) {
  EXPECT_THAT(Refusal({"--listen.unix_socket=", "--listen.metrics=none"}),
              HasSubstr("--listen.unix_socket= has an empty value"));
}

TEST_F(CommandLineTest, SocketPathThatEnginesAreToldIsAbsolute) {
  const std::string here = std::filesystem::current_path().string();
  const auto line = Parse({"--listen.unix_socket=./sub/../crumbd.sock"});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->config.unix_socket, here + "/crumbd.sock");
  EXPECT_EQ(line->config.memory_socket(), here + "/crumbd.sock.mem");
  std::ofstream(file_) << "[listen]\nunix_socket = \"c.sock\"\n";
  EXPECT_EQ(Parse({"--config", file_})->config.unix_socket, here + "/c.sock");
  std::ofstream(file_) << "[listen]\nunix_socket = \"\"\n";
  EXPECT_THAT(Refusal({"--config", file_}), HasSubstr("listen.unix_socket is empty"));
}

TEST_F(CommandLineTest, ListeningBeyondLoopbackIsRefusedByFlagToo) {
  EXPECT_THAT(Refusal({"--listen.tcp=0.0.0.0:7070"}), HasSubstr("listen.insecure"));
  EXPECT_TRUE(Parse({"--listen.tcp=0.0.0.0:7070", "--listen.insecure=true"}).ok());
  EXPECT_TRUE(Parse({"--listen.tcp=none", "--listen.metrics=none"}).ok());
}

TEST_F(CommandLineTest, MissingFileIsNamed) {
  const auto line = Parse({"--config=/nonexistent/crumbd.toml"});
  EXPECT_EQ(line.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(line.status().message()), HasSubstr("/nonexistent/crumbd.toml"));
}

TEST_F(CommandLineTest, PrintedConfigurationIsTheOneThatWouldBeUsed) {
  const auto line = Parse({"--config", file_, "--demote.queue=9", "--print-config"});
  ASSERT_TRUE(line.ok()) << line.status();
  Config read;
  ASSERT_TRUE(LoadConfigText(line->text, "printed", read).ok());
  EXPECT_EQ(read.store.capacity_bytes, size_t{1} << 30);
  EXPECT_EQ(read.demote.max_jobs, 9u);
}

TEST_F(CommandLineTest, HelpNamesEveryKey) {
  const auto line = Parse({"--help"});
  ASSERT_TRUE(line.ok()) << line.status();
  for (const ConfigKey& key : ConfigKeys()) {
    EXPECT_THAT(line->text, HasSubstr(absl::StrCat("--", std::string(key.path))));
  }
}

TEST_F(CommandLineTest, CheckedConfigurationIsSaidToBeRightOrNot) {
  const auto line = Parse({"--check-config", "--config", file_});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_THAT(line->text, HasSubstr(file_));
  std::ofstream(file_) << "[store]\nlaese = \"7s\"\n";
  EXPECT_THAT(Refusal({"--check-config", "--config", file_}),
              AllOf(HasSubstr("line 2"), HasSubstr("store.lease?")));
}

}  // namespace
}  // namespace crumb
