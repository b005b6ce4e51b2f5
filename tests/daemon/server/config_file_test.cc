// SPDX-License-Identifier: Apache-2.0
#include "daemon/server/config_file.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "daemon/server/config.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

// What the reader says of `text` as the file crumbd.toml, if it refuses it.
std::string Refusal(const std::string& text) {
  Config config;
  const absl::Status status = LoadConfigText(text, "crumbd.toml", config);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
  return std::string(status.message());
}

std::string ReadAll(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// `text` with each line "key = value" made the comment "# key = value".
std::string WithValuesCommentedOut(const std::string& text) {
  std::istringstream lines(text);
  std::string out;
  for (std::string line; std::getline(lines, line);) {
    const bool is_value = !line.empty() && line[0] != '#' && line[0] != '[';
    out += (is_value ? "# " : "") + line + "\n";
  }
  return out;
}

TEST(ConfigFileTest, SetsWhatTheFileSaysAndLeavesTheRest) {
  Config config;
  const absl::Status status = LoadConfigText(
      "[listen]\n"
      "unix_socket = \"/tmp/crumb.sock\"\n"
      "unix_socket_mode = \"0600\"\n"
      "tcp = \"127.0.0.1:7070\"\n"
      "metrics = \"none\"\n"
      "[store]\n"
      "capacity = \"512MiB\"\n"
      "chunk = 1048576\n"
      "lease = \"5s\"\n"
      "[ucx]\n"
      "enabled = true\n"
      "[log]\n"
      "level = \"warning\"\n"
      "format = \"json\"\n",
      "crumbd.toml", config);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(config.unix_socket, "/tmp/crumb.sock");
  EXPECT_EQ(config.memory_socket(), "/tmp/crumb.sock.mem");
  EXPECT_EQ(config.unix_socket_mode, 0600u);
  EXPECT_EQ(config.tcp, "127.0.0.1:7070");
  EXPECT_EQ(config.metrics, "");
  EXPECT_EQ(config.store.capacity_bytes, size_t{512} << 20);
  EXPECT_EQ(config.store.chunk_bytes, size_t{1} << 20);
  EXPECT_EQ(config.store.lease, absl::Seconds(5));
  EXPECT_TRUE(config.ucx.enabled);
  EXPECT_EQ(config.log_level, LogLevel::kWarning);
  EXPECT_EQ(config.log_format, LogFormat::kJson);
  EXPECT_EQ(config.store.quarantine, Config().store.quarantine);
  EXPECT_EQ(config.demote.max_jobs, Config().demote.max_jobs);
  EXPECT_FALSE(config.insecure);
}

TEST(ConfigFileTest, UnknownKeyNamesTheLineAndTheNearestKey) {
  EXPECT_THAT(Refusal("# ours\n[store]\nlease = \"5s\"\ncapcity = \"4GiB\"\n"),
              AllOf(HasSubstr("crumbd.toml, line 4"), HasSubstr("store.capcity"),
                    HasSubstr("did you mean store.capacity?")));
  EXPECT_THAT(
      Refusal("[store]\nzzzzzzzzzzzzzzzzzzz = 1\n"),
      AllOf(HasSubstr("line 2"), Not(HasSubstr("did you mean")), HasSubstr("--print-config")));
}

TEST(ConfigFileTest, UnknownSectionNamesTheLineAndTheNearestSection) {
  EXPECT_THAT(Refusal("\n[stor]\ncapacity = \"4GiB\"\n"),
              AllOf(HasSubstr("line 2"), HasSubstr("[stor]"), HasSubstr("did you mean [store]?")));
  EXPECT_THAT(Refusal("[cluster_members]\n"), Not(HasSubstr("did you mean")));
}

TEST(ConfigFileTest, KeyOutsideOfASectionIsRefused) {
  EXPECT_THAT(Refusal("capacity = \"4GiB\"\n"),
              AllOf(HasSubstr("line 1"), HasSubstr("capacity"), HasSubstr("outside of a section")));
}

TEST(ConfigFileTest, SectionWithinASectionIsAnUnknownKey) {
  EXPECT_THAT(Refusal("[store.disk]\npath = \"/tmp\"\n"), HasSubstr("unknown key store.disk"));
}

TEST(ConfigFileTest, WrongTypesAreRefusedWithTheLineAndTheRightType) {
  EXPECT_THAT(Refusal("[listen]\n\nunix_socket = 3\n"),
              AllOf(HasSubstr("line 3"), HasSubstr("listen.unix_socket must be a string")));
  EXPECT_THAT(Refusal("[listen]\nunix_socket_mode = 0o660\n"), HasSubstr("must be a string"));
  EXPECT_THAT(Refusal("[listen]\ninsecure = \"true\"\n"), HasSubstr("must be true or false"));
  EXPECT_THAT(Refusal("[store]\ncapacity = 4.5\n"), HasSubstr("must be a size"));
  EXPECT_THAT(Refusal("[store]\nmax_sessions = \"8\"\n"), HasSubstr("must be a whole number"));
  EXPECT_THAT(Refusal("[store]\nmax_sessions = [8]\n"), HasSubstr("must be a whole number"));
}

TEST(ConfigFileTest, BadValuesAreRefusedWithTheKeyTheValueAndHowToWriteIt) {
  EXPECT_THAT(Refusal("[store]\ncapacity = \"4GB\"\n"),
              AllOf(HasSubstr("line 2: store.capacity: \"4GB\""), HasSubstr("as in 4GiB")));
  EXPECT_THAT(Refusal("[store]\ncapacity = -1\n"), HasSubstr("\"-1\" is no size"));
  EXPECT_THAT(Refusal("[store]\nlease = \"soon\"\n"), HasSubstr("\"soon\" is no time"));
  EXPECT_THAT(Refusal("[store]\ncapacity = 0\n"),
              AllOf(HasSubstr("store.capacity: \"0\" is too little"), HasSubstr("4KiB")));
  EXPECT_THAT(Refusal("[store]\nchunk = \"4095\"\n"), HasSubstr("\"4095\" is too little"));
  EXPECT_THAT(Refusal("[store]\ngpu_chunk = 1\n"), HasSubstr("\"1\" is too little"));
  EXPECT_THAT(Refusal("[store]\nlease = \"99ms\"\n"),
              AllOf(HasSubstr("\"99ms\""), HasSubstr("from 100ms to 24h")));
  EXPECT_THAT(Refusal("[store]\nlease = \"1200h\"\n"), HasSubstr("from 100ms to 24h"));
  EXPECT_THAT(Refusal("[store]\nquarantine = \"25h\"\n"), HasSubstr("to 24h"));
  EXPECT_THAT(Refusal("[listen]\ndrain_timeout = \"1ns\"\n"), HasSubstr("from 1ms"));
  EXPECT_THAT(Refusal("[store]\nmax_sessions = 0\n"), HasSubstr("from 1 to 1048576"));
  EXPECT_THAT(Refusal("[demote]\nqueue = 65537\n"), HasSubstr("from 1 to 65536"));
  EXPECT_THAT(Refusal("[ucx]\nport = 65536\n"), HasSubstr("from 0 to 65535"));
  EXPECT_THAT(Refusal("[listen]\ntcp = \"7070\"\n"), HasSubstr("host:port"));
  EXPECT_THAT(Refusal("[log]\nlevel = \"loud\"\n"),
              HasSubstr("debug, info, warning, error or off"));
  EXPECT_THAT(Refusal("[log]\nformat = \"xml\"\n"), HasSubstr("text or json"));
}

TEST(ConfigFileTest, NoTomlNamesTheLine) {
  EXPECT_THAT(Refusal("[store]\ncapacity = \"4GiB\n"), HasSubstr("crumbd.toml, line 2"));
  EXPECT_THAT(Refusal("[store]\nlease = \"5s\"\nlease = \"6s\"\n"), HasSubstr("line 3"));
}

TEST(ConfigFileTest, ListeningBeyondLoopbackNeedsInsecureWrittenOut) {
  Config config;
  EXPECT_TRUE(CheckConfig(config).ok());
  config.tcp = "127.0.0.1:7070";
  EXPECT_TRUE(CheckConfig(config).ok());
  for (const char* address : {"0.0.0.0:7070", "[::]:7070", "127.example.com:7070"}) {
    config.tcp = address;
    const absl::Status status = CheckConfig(config);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << address;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("listen.tcp"), HasSubstr(address), HasSubstr("listen.insecure")));
  }
  config.insecure = true;
  EXPECT_TRUE(CheckConfig(config).ok());
}

TEST(ConfigFileTest, UcxBeyondLoopbackNeedsInsecureOnlyWhereItIsEnabled) {
  Config config;
  config.ucx.host = "0.0.0.0";
  EXPECT_TRUE(CheckConfig(config).ok());
  config.ucx.enabled = true;
  EXPECT_THAT(std::string(CheckConfig(config).message()),
              AllOf(HasSubstr("ucx.host"), HasSubstr("0.0.0.0"), HasSubstr("listen.insecure")));
  config.insecure = true;
  EXPECT_TRUE(CheckConfig(config).ok());
}

TEST(ConfigFileTest, UcxHostIsAnAddressInDigits) {
  Config config;
  config.ucx.enabled = true;
  for (const char* host : {"localhost", "node-7", "127.0.0.9999", "[::1]", ""}) {
    config.ucx.host = host;
    EXPECT_THAT(
        std::string(CheckConfig(config).message()),
        AllOf(HasSubstr("ucx.host is \"" + std::string(host) + "\""), HasSubstr("in digits")));
  }
  config.ucx.host = "::1";
  EXPECT_TRUE(CheckConfig(config).ok()) << CheckConfig(config);
}

TEST(ConfigFileTest, EveryKeysDefaultIsTextThatItTakes) {
  for (const ConfigKey& key : ConfigKeys()) {
    const std::string text = key.get(Config());
    Config config;
    EXPECT_TRUE(key.set(text, config).ok()) << key.path << " = " << text;
    EXPECT_EQ(key.get(config), text) << key.path;
  }
}

TEST(ConfigFileTest, PrintedConfigurationReadsBack) {
  Config config;
  config.unix_socket = "/tmp/a \"quoted\\\" name";
  config.tcp = "[::1]:1";
  config.store.capacity_bytes = (size_t{1} << 30) + 1;
  config.demote.num_threads = 3;
  config.log_level = LogLevel::kOff;
  Config read;
  ASSERT_TRUE(LoadConfigText(PrintConfig(config), "printed", read).ok());
  EXPECT_EQ(PrintConfig(read), PrintConfig(config));
  EXPECT_EQ(read.unix_socket, config.unix_socket);
}

TEST(ConfigFileTest, DeployedFileListsEveryKeyWithItsDefaultAndSetsNone) {
  const std::string text = ReadAll(CRUMB_DEPLOYED_CONFIG);
  const size_t first_section = text.find("\n[");
  ASSERT_NE(first_section, std::string::npos) << CRUMB_DEPLOYED_CONFIG;
  EXPECT_EQ(text.substr(first_section + 1), WithValuesCommentedOut(PrintConfig(Config())))
      << "write it anew from `crumbd --print-config`";
  Config config;
  ASSERT_TRUE(LoadConfigFile(CRUMB_DEPLOYED_CONFIG, config).ok());
  EXPECT_EQ(PrintConfig(config), PrintConfig(Config()));
}

class ConfigPathTest : public testing::Test {
 protected:
  ConfigPathTest() { std::filesystem::create_directory(directory_); }
  ~ConfigPathTest() override { std::filesystem::remove_all(directory_); }

  const std::filesystem::path directory_ =
      std::filesystem::path(testing::TempDir()) / absl::StrCat("config_path_test.", getpid());
};

TEST_F(ConfigPathTest, MissingFileIsNotFoundWithItsName) {
  Config config;
  const absl::Status status = LoadConfigFile(directory_ / "none.toml", config);
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("none.toml"), HasSubstr("No such file")));
}

TEST_F(ConfigPathTest, EmptyFileSetsNothing) {
  std::ofstream(directory_ / "empty.toml").close();
  Config config;
  EXPECT_TRUE(LoadConfigFile(directory_ / "empty.toml", config).ok());
  EXPECT_EQ(PrintConfig(config), PrintConfig(Config()));
}

TEST_F(ConfigPathTest, DirectoryIsNotTakenForAnEmptyFile) {
  Config config;
  const absl::Status status = LoadConfigFile(directory_, config);
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr(directory_.string()));
}

}  // namespace
}  // namespace crumb
