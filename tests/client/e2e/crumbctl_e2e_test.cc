// SPDX-License-Identifier: Apache-2.0
//
// crumbctl as an operator runs it, against a real crumbd that real clients use.
#include <pty.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "crumb/client.h"
#include "nlohmann/json.hpp"
#include "tests/client/e2e/client_fixture.h"
#include "tests/support/program_path.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;
using Json = nlohmann::json;

class CrumbctlTest : public ClientTest {
 protected:
  ProgramResult Ctl(std::vector<std::string> arguments) const {
    arguments.push_back("--address=" + daemon_->address());
    return RunProgram("crumbctl", arguments);
  }
  std::string Text(const std::vector<std::string>& arguments) const {
    const ProgramResult result = Ctl(arguments);
    EXPECT_EQ(result.exit_status, 0) << result.err;
    return result.out;
  }
  Json Ask(std::vector<std::string> arguments) const {
    arguments.push_back("--json");
    const Json json = Json::parse(Text(arguments), nullptr, /*allow_exceptions=*/false);
    EXPECT_TRUE(json.is_object()) << json;
    return json;
  }
  void Publish(Client& client,
               const std::vector<uint32_t>& prompt,
               const std::string& context_key = "") {
    const auto published =
        client.Publish(*Prefill(512), std::span(prompt).first(512), {.context_key = context_key});
    ASSERT_TRUE(published.ok()) << published.status();
  }
  // As crumbctl reads them.
  std::string TokenFile(size_t num_tokens) const {
    const std::string path = (daemon_->directory() / "tokens").string();
    std::ofstream file(path);
    for (size_t i = 0; i < num_tokens; ++i) {
      file << prompt_[i] << (i % 10 == 9 ? '\n' : ',');
    }
    return path;
  }
  // A prompt that shares the first four pages.
  std::vector<uint32_t> Branch() const {
    std::vector<uint32_t> branch = prompt_;
    branch[300] ^= 1;
    return branch;
  }
};

TEST_F(CrumbctlTest, StatusSaysWhatIsHeldAndByWhom) {
  StartDaemon();
  const auto client = NewClient();
  Publish(*client, prompt_);
  const auto prefix = *client->Lookup(std::span(prompt_).first(513), {});
  const Json status = Ask({"status"});
  EXPECT_EQ(status["int2_pages"], 7) << "all but the sink";
  EXPECT_EQ(status["bf16_pages"], 3) << "the sink and the tail";
  EXPECT_EQ(status["leases"], 1);
  EXPECT_EQ(status["leased_pages"], 8);
  EXPECT_EQ(status["publishes"], 0);
  EXPECT_GT(status["used_bytes"], 0);
  EXPECT_LE(status["used_bytes"], status["chunk_bytes"]);
  EXPECT_EQ(status["capacity_bytes"], uint64_t{4} << 30);
  ASSERT_EQ(status["sessions"].size(), 1u);
  EXPECT_EQ(status["sessions"][0]["client_name"], "engine");
  EXPECT_EQ(status["sessions"][0]["pid"], ::getpid());
  EXPECT_EQ(status["sessions"][0]["profile_id"], profile_->id().Hex());
  ASSERT_EQ(status["namespaces"].size(), 1u);
  EXPECT_EQ(status["namespaces"][0]["tenant"], "default");
  EXPECT_EQ(status["namespaces"][0]["pages"], 8);
  EXPECT_EQ(status["counters"]["lookups"], 1);
  EXPECT_EQ(status["counters"]["hit_tokens"], 512);
  EXPECT_EQ(status["data_planes"].size(), 3u);

  const std::string text = Text({"status"});
  EXPECT_THAT(text, AllOf(HasSubstr("pages      7 in INT2, 3 in BF16"), HasSubstr("serving"),
                          HasSubstr("leases     1 on 8 pages"), HasSubstr("99.8 % matched"),
                          HasSubstr("NAMESPACE"), HasSubstr("SESSION"),
                          HasSubstr(profile_->id().Hex().substr(0, 12))));
}

TEST_F(CrumbctlTest, TreeShowsTheSharedPrefixesWithTokensBytesHitsAndLeases) {
  StartDaemon();
  EXPECT_EQ(Text({"tree"}), "no prefixes are held\n");
  const auto client = NewClient();
  Publish(*client, prompt_);
  Publish(*client, Branch());
  const auto prefix = *client->Lookup(std::span(prompt_).first(513), {});
  const Json nodes = Ask({"tree"})["nodes"];
  ASSERT_EQ(nodes.size(), 3u) << nodes;
  EXPECT_EQ(nodes[0]["parent_id"], 0);
  EXPECT_EQ(nodes[0]["first_token"], 0);
  EXPECT_EQ(nodes[0]["num_tokens"], 256);
  EXPECT_EQ(nodes[0]["int2_bytes"], 3 * profile_->geometry().PageBytes(PageEncoding::kInt2));
  EXPECT_EQ(nodes[0]["bf16_bytes"], profile_->geometry().PageBytes(PageEncoding::kBf16));
  EXPECT_EQ(nodes[0]["head_tokens"][1], prompt_[1]);
  EXPECT_EQ(nodes[0]["hits"], 1);
  uint32_t leased = 0;
  for (const size_t i : {1u, 2u}) {
    EXPECT_EQ(nodes[i]["parent_id"], nodes[0]["id"]);
    EXPECT_EQ(nodes[i]["first_token"], 256);
    EXPECT_EQ(nodes[i]["num_tokens"], 256);
    leased += nodes[i]["leases"].get<uint32_t>();
  }
  EXPECT_EQ(leased, 1u) << "of the branch that was looked up";

  const std::string text = Text({"tree"});
  const std::string head = std::to_string(prompt_[0]) + " " + std::to_string(prompt_[1]);
  EXPECT_THAT(text, AllOf(HasSubstr("tenant default"), HasSubstr("\n[0, 256) "), HasSubstr(head),
                          HasSubstr("\n  [256, 512) "), HasSubstr("LEASES")));
  EXPECT_THAT(Text({"tree", "--max-nodes=1"}),
              AllOf(HasSubstr("only the first 1 branches"), Not(HasSubstr("[256, 512)"))));
  EXPECT_EQ(Ask({"tree", "--max-nodes=1"})["truncated"], true);
}

TEST_F(CrumbctlTest, ProbeSaysHowMuchOfAPromptIsHeldAndWarmsNothing) {
  StartDaemon();
  Publish(*NewClient(), prompt_);
  const Json probe = Ask({"probe", "--tokens-file=" + TokenFile(600)});
  EXPECT_EQ(probe["matched_tokens"], 512);
  EXPECT_EQ(probe["usable_tokens"], 512);
  EXPECT_EQ(probe["trimmed_tokens"], 0);
  EXPECT_THAT(Text({"probe", "--tokens-file=" + TokenFile(600)}),
              AllOf(HasSubstr("prompt   600 tokens"), HasSubstr("matched  512 (85.3 %)")));
  EXPECT_EQ(Ask({"probe", "--tokens=7,8"})["matched_tokens"], 0);
  EXPECT_EQ(Ask({"tree"})["nodes"][0]["hits"], 0);
  EXPECT_EQ(Ask({"status"})["counters"]["lookups"], 0);
}

TEST_F(CrumbctlTest, EvictDropsAPrefixAndWhatExtendsItButNothingLeased) {
  StartDaemon();
  const auto client = NewClient();
  Publish(*client, prompt_);
  Publish(*client, Branch());
  auto held = *client->Lookup(std::span(prompt_).first(513), {});
  const Json first = Ask({"evict", "--tokens-file=" + TokenFile(256)});
  EXPECT_EQ(first["evicted_pages"], 4) << "the branch";
  EXPECT_EQ(first["leased_pages_kept"], 8);
  EXPECT_GT(first["freed_bytes"], 0);
  EXPECT_TRUE(held->Validate().ok()) << held->Validate();
  EXPECT_THAT(Text({"evict", "--all"}),
              AllOf(StartsWith("0 pages evicted, 0 B freed"), HasSubstr("8 pages are kept")));

  held = nullptr;  // Released in the background.
  uint64_t evicted = 0;
  WaitFor([&] {
    evicted = Ask({"evict", "--all"})["evicted_pages"].get<uint64_t>();
    return evicted > 0;
  });
  EXPECT_EQ(evicted, 8u);
  EXPECT_EQ((*client->Lookup(prompt_, {}))->num_pages(), 0u);
  EXPECT_THAT(Ctl({"evict", "--all"}).err, HasSubstr("holds no namespace yet"));
}

TEST_F(CrumbctlTest, TopHasALineASampleForPipesAndPrograms) {
  StartDaemon();
  const auto client = NewClient();
  Publish(*client, prompt_);
  std::atomic<bool> stop{false};
  std::thread load([&] {
    while (!stop) {
      EXPECT_TRUE(client->Lookup(prompt_, {}).ok());
    }
  });
  const std::string lines = Text({"top", "--samples=3", "--interval=0.2", "--json"});
  const std::string text = Text({"top", "--samples=2", "--interval=0.2"});
  stop = true;
  load.join();
  std::istringstream in(lines);
  size_t samples = 0;
  for (std::string line; std::getline(in, line); ++samples) {
    const Json sample = Json::parse(line);
    EXPECT_GT(sample["lookups_per_second"], 0);
    EXPECT_EQ(sample["interval_hit_tokens"].get<uint64_t>() * 2,
              sample["interval_lookup_tokens"].get<uint64_t>())
        << "512 of 1,024 tokens match";
    EXPECT_EQ(sample["sessions"], 1);
  }
  EXPECT_EQ(samples, 3u);
  EXPECT_THAT(text, AllOf(StartsWith("   LOOKUPS/s"), HasSubstr("50.0 %")));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3);
}

TEST_F(CrumbctlTest, TopIsALiveViewOnATerminalUntilQ) {
  StartDaemon();
  Publish(*NewClient(), prompt_);
  const std::string program = ProgramPath("crumbctl").string();
  const std::string address = "--address=" + daemon_->address();
  int terminal = -1;
  const pid_t pid = ::forkpty(&terminal, nullptr, nullptr, nullptr);
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    ::execl(program.c_str(), "crumbctl", address.c_str(), "top", "--interval=0.1", nullptr);
    ::_exit(127);
  }
  termios before{};
  ASSERT_EQ(::tcgetattr(terminal, &before), 0);
  std::string screen;
  const auto read_some = [&] {
    char piece[4096];
    const ssize_t got = ::read(terminal, piece, sizeof(piece));
    screen.append(piece, got > 0 ? static_cast<size_t>(got) : 0);
    return got > 0;
  };
  while (screen.find("q leaves") == std::string::npos && read_some()) {
  }
  EXPECT_THAT(screen, AllOf(HasSubstr("lookups/s"), HasSubstr("[0, 512)"), HasSubstr("pages/s")));
  ASSERT_EQ(::write(terminal, "q", 1), 1);
  while (read_some()) {
  }
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  termios after{};
  if (::tcgetattr(terminal, &after) == 0) {
    EXPECT_EQ(after.c_lflag & (ICANON | ECHO | ISIG), before.c_lflag & (ICANON | ECHO | ISIG));
  }
  ::close(terminal);
}

TEST_F(CrumbctlTest, SeveralNamespacesAreToldApart) {
  StartDaemon();
  const auto client = NewClient();
  Publish(*client, prompt_, "lora-a");
  Publish(*client, prompt_, "lora-b\x1b[31m");
  const ProgramResult unclear = Ctl({"probe", "--tokens=1"});
  EXPECT_EQ(unclear.exit_status, 2);
  EXPECT_THAT(unclear.err, AllOf(HasSubstr("2 namespaces are there"), HasSubstr("lora-a"),
                                 HasSubstr("lora-b\\x1b[31m")));
  const Json space = Ask({"status"})["namespaces"][0];
  const std::string id = space["namespace_id"].get<std::string>().substr(0, 8);
  EXPECT_EQ(Ask({"probe", "-n", id, "-f", TokenFile(512)})["matched_tokens"], 512);
  EXPECT_EQ(Ask({"tree", "-n", id})["nodes"].size(), 1u);
  EXPECT_EQ(Ask({"tree"})["nodes"].size(), 2u);
  EXPECT_EQ(Ask({"evict", "-n", id, "--all"})["evicted_pages"], 8);
  EXPECT_EQ(Ask({"status"})["namespaces"].size(), 1u);
  for (const char* command : {"status", "tree"}) {
    EXPECT_THAT(Text({command}), Not(HasSubstr("\x1b"))) << command;
  }
}

TEST_F(CrumbctlTest, WrongArgumentsAreStatusTwoAndNamed) {
  StartDaemon();
  const struct {
    std::vector<std::string> arguments;
    std::string named;
  } cases[] = {
      {{"statsu"}, "statsu"},
      {{"status", "--jsno"}, "--jsno"},
      {{"status", "--timeout=0"}, "--timeout"},
      {{"tree", "--max-nodes=100001"}, "100001 not in range"},
      {{"top", "--interval=0"}, "--interval"},
      {{"probe"}, "--tokens-file"},
      {{"probe", "--tokens=1,x"}, "token 1 is \"x\""},
      {{"probe", "--tokens=1", "--tokens-file=x"}, "excludes"},
      {{"probe", "--tokens-file=" + daemon_->directory().string()}, "is a folder"},
      {{"probe", "--tokens-file=/dev/null"}, "no tokens"},
      {{"evict"}, "--all for the whole namespace"},
      {{"evict", "--all", "--tokens=1"}, "excludes"},
      {{"status", "--namespace="}, "--namespace= has an empty value"},
  };
  for (const auto& [arguments, named] : cases) {
    const ProgramResult result = Ctl(arguments);
    EXPECT_EQ(result.exit_status, 2) << named;
    EXPECT_THAT(result.err, HasSubstr(named));
    EXPECT_EQ(result.out, "");
  }
  for (const std::string address : {"", "nowhere", "/run/crumbd.sock", "unix:", "host:0"}) {
    const ProgramResult result = RunProgram("crumbctl", {"status", "--address", address});
    EXPECT_EQ(result.exit_status, 2) << address;
    EXPECT_THAT(result.err, HasSubstr("unix:")) << address;
  }
}

TEST_F(CrumbctlTest, StoppedDaemonIsNamedAtTheTimeout) {
  StartDaemon();
  StopDaemon();
  const ProgramResult result = Ctl({"status", "--timeout=0.2"});
  EXPECT_EQ(result.exit_status, 1);
  EXPECT_THAT(result.err, AllOf(HasSubstr(daemon_->address()), HasSubstr("--timeout")));
  daemon_->Signal(SIGCONT);
}

TEST_F(CrumbctlTest, EnginesAndOperatorsComeByTcpWhereItIsAskedFor) {
  StartDaemon({"--listen.tcp=127.0.0.1:0", "--ucx.enabled=true"});
  const std::string address = "127.0.0.1:" + std::to_string(daemon_->ReadyNumber("tcp_port"));
  const auto client =
      *Client::Create({.address = address, .profile = profile_, .data_plane = DataPlane::kUcx});
  ASSERT_TRUE(client->WaitAttached(absl::Seconds(20)).ok());
  Publish(*client, prompt_);
  const auto prefix = *client->Lookup(std::span(prompt_).first(513), {});
  EXPECT_EQ(prefix->usable_tokens(), 512u);
  EXPECT_TRUE(prefix->Validate().ok()) << prefix->Validate();
  const ProgramResult status = RunProgram("crumbctl", {"status", "--json", "--address", address});
  EXPECT_EQ(status.exit_status, 0) << status.err;
  EXPECT_EQ(Json::parse(status.out)["int2_pages"], 7);
  EXPECT_THAT(daemon_->Log(), HasSubstr("listening_in_clear_text"));
}

}  // namespace
}  // namespace crumb
