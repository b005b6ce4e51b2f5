// SPDX-License-Identifier: Apache-2.0
//
// An engine or the daemon killed in the very middle of a call: the other end stands still when the
// call is made, so that the kill finds it under way. And either of them stopped for longer than a
// lease. By the map and over UCX.
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "crumb/client.h"
#include "nlohmann/json.hpp"
#include "tests/client/e2e/client_fixture.h"
#include "tests/client/e2e/engine_process.h"
#include "tests/client/e2e/raw_session.h"

namespace crumb {
namespace {

using testing::AnyOf;
using testing::StartsWith;

// Whether the thread waits for something; false when it is gone.
bool IsAsleep(pid_t process, pid_t thread) {
  std::string stat;
  std::getline(std::ifstream("/proc/" + std::to_string(process) + "/task/" +
                             std::to_string(thread) + "/stat"),
               stat);
  const size_t name_end = stat.rfind(')');
  return name_end != std::string::npos && stat.substr(name_end, 3) == ") S";
}

class FaultsTest : public ClientTest, public testing::WithParamInterface<DataPlane> {
 protected:
  void Start(const std::vector<std::string>& more = {}) {
    std::vector<std::string> flags = {"--ucx.enabled=true"};
    flags.insert(flags.end(), more.begin(), more.end());
    StartDaemon(flags);
    client_ = NewClient(GetParam());
    sequence_ = Prefill(512);
    const auto published = client_->Publish(*sequence_, std::span(prompt_).first(512), {});
    ASSERT_TRUE(published.ok()) << published.status();
  }
  EngineProcess NewEngine() {
    auto engine =
        EngineProcess::Start(daemon_->address(), GetParam() == DataPlane::kUcx ? "ucx" : "map");
    EXPECT_TRUE(engine.ok()) << engine.status();
    return *std::move(engine);
  }
  // What the daemon holds open: sockets, staging memory, chunks.
  size_t NumDescriptors() const {
    const std::filesystem::directory_iterator fds("/proc/" + std::to_string(daemon_->pid()) +
                                                  "/fd");
    return static_cast<size_t>(std::distance(begin(fds), end(fds)));
  }
  nlohmann::json Status() const {
    return nlohmann::json::parse(
        RunProgram("crumbctl", {"--address=" + daemon_->address(), "status", "--json"}).out);
  }
  // Nothing is left but this test's own client, which is served.
  void ExpectNothingLeft(const std::string& what) {
    SCOPED_TRACE(what);
    WaitFor([&] {
      const auto status = Status();
      return status["publishes"] == 0 && status["leases"] == 0 && status["sessions"].size() == 1;
    });
    const auto prefix = client_->Lookup(prompt_, {});
    ASSERT_TRUE(prefix.ok()) << prefix.status();
    EXPECT_EQ((*prefix)->matched_tokens(), 512u);
    EXPECT_TRUE((*prefix)->Validate().ok()) << (*prefix)->Validate();
  }

  std::unique_ptr<Client> client_;
  std::unique_ptr<Sequence> sequence_;
};

INSTANTIATE_TEST_SUITE_P(Planes,
                         FaultsTest,
                         testing::Values(DataPlane::kMap, DataPlane::kUcx),
                         [](const auto& test) {
                           return std::string(test.param == DataPlane::kUcx ? "Ucx" : "Map");
                         });

TEST_P(FaultsTest, EngineKilledInACallLeavesNothing) {
  Start();
  // What is asked before, and the call in which it is killed.
  const struct {
    std::vector<std::string> before;
    std::string call;
  } cases[] = {
      {{}, "lookup 5 1000"},      {{"find 5 1000"}, "open"},
      {{}, "publish 7 512"},      {{"find 5 1000"}, "stage 8 512"},
      {{"stage 9 512"}, "write"}, {{"stage 10 512", "write"}, "commit"},
  };
  size_t descriptors = 0;
  for (int round = 0; round < 2; ++round) {
    for (const auto& [before, call] : cases) {
      auto engine = NewEngine();
      for (const std::string& command : before) {
        ASSERT_THAT(engine.Ask(command), AnyOf("found 512", "staged", "written")) << command;
      }
      StopDaemon();
      engine.Send("loud " + call);
      ASSERT_EQ(engine.ReadLine(), "begun");
      WaitFor([&] { return IsAsleep(engine.pid(), engine.pid()); });
      engine.Kill();
      daemon_->Signal(SIGCONT);
      ExpectNothingLeft(call);
    }
    // What gRPC and UCX open once, they have opened in the first round.
    if (round == 0) {
      descriptors = NumDescriptors();
    }
  }
  WaitFor([&] { return NumDescriptors() <= descriptors; });
}

// While the daemon works on its calls: publishes that are checked and demoted, lookups, pulls.
TEST_P(FaultsTest, EnginesKilledAtRandomMomentsLeaveNothing) {
  Start();
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (uint32_t round = 1; round <= 12; ++round) {
    auto engine = NewEngine();
    engine.Send("churn " + std::to_string(100 * round));
    ASSERT_THAT(engine.ReadLine(), StartsWith("published 8 0"));
    const absl::Time moment = Clock::System().Now() + absl::Microseconds(random() % 30'000);
    WaitFor([&] { return Clock::System().Now() >= moment; });
    engine.Kill();
    ExpectNothingLeft("round " + std::to_string(round));
  }
}

TEST_P(FaultsTest, EngineKilledBetweenItsCallsLeavesNothing) {
  Start();
  auto stager = NewEngine();
  ASSERT_EQ(stager.Ask("stage 7 512"), "staged");
  ASSERT_EQ(Status()["publishes"], 1);
  stager.Kill();
  ExpectNothingLeft("stage");
  EXPECT_EQ((*client_->Lookup(E2ePrompt(7, 600), {}))->matched_tokens(), 0u) << "never committed";

  auto writer = NewEngine();
  ASSERT_EQ(writer.Ask("stage 7 512"), "staged");
  ASSERT_EQ(writer.Ask("write"), "written");
  ASSERT_EQ(Status()["publishes"], 1);
  writer.Kill();
  ExpectNothingLeft("write");
  EXPECT_EQ((*client_->Lookup(E2ePrompt(7, 600), {}))->matched_tokens(), 0u) << "never committed";

  auto committer = NewEngine();
  ASSERT_EQ(committer.Ask("stage 7 512"), "staged");
  ASSERT_EQ(committer.Ask("write"), "written");
  ASSERT_EQ(committer.Ask("commit"), "committed 8");
  committer.Kill();
  ExpectNothingLeft("commit");
  EXPECT_EQ((*client_->Lookup(E2ePrompt(7, 600), {}))->matched_tokens(), 512u);

  auto reader = NewEngine();
  ASSERT_EQ(reader.Ask("lookup 5 1000"), "found 512");
  ASSERT_EQ(reader.Ask("read"), "reading");
  ASSERT_EQ(Status()["leases"], 1);
  reader.Kill();
  ExpectNothingLeft("read");
}

TEST_P(FaultsTest, DaemonKilledInACallIsUnavailableAtOnceAndItsSuccessorServes) {
  Start();
  using Call = std::function<absl::Status(RawSession&, const FoundPrefix&, const CommitParams&)>;
  const std::vector<BFloat16> rows(2 * RawSession(daemon_->address(), profile_).PageElements());
  const std::vector<uint32_t> other = E2ePrompt(7, 128);
  const std::pair<const char*, Call> calls[] = {
      {"lookup", [&](auto& session, auto&, auto&) { return session.Lookup(prompt_).status(); }},
      {"map or pull",
       [](auto& session, auto& found, auto&) {
         const auto source = session.Open(found);
         return source.ok() ? (*source)->Validate() : source.status();
       }},
      {"publish", [&](auto& session, auto&,
                      auto&) { return session.Stage(E2ePrompt(8, 128), rows).status(); }},
      {"commit",
       [](auto& session, auto&, auto& staged) { return session.Commit(staged).status(); }},
  };
  for (const auto& [name, call] : calls) {
    SCOPED_TRACE(name);
    RawSession session(daemon_->address(), profile_, GetParam());
    const auto found = session.Lookup(prompt_);
    ASSERT_TRUE(found.ok()) << found.status();
    const auto staged = session.Stage(other, rows);
    ASSERT_TRUE(staged.ok()) << staged.status();
    StopDaemon();
    std::atomic<pid_t> thread_id{0};
    absl::Status status;
    std::thread thread([&, &call = call] {
      thread_id = static_cast<pid_t>(::syscall(SYS_gettid));
      status = call(session, *found, *staged);
    });
    WaitFor([&] { return thread_id != 0 && IsAsleep(::getpid(), thread_id); });
    const absl::Time killed = Clock::System().Now();
    daemon_->Kill();
    thread.join();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_LT(Clock::System().Now() - killed, absl::Seconds(10)) << "waited for its deadline";

    RestartDaemon();
    ASSERT_TRUE(client_->WaitAttached(absl::Seconds(20)).ok());
    const auto published = client_->Publish(*sequence_, std::span(prompt_).first(512), {});
    ASSERT_TRUE(published.ok()) << published.status();
    EXPECT_EQ(published->pages_added, 8u) << "the successor knew nothing";
    EXPECT_TRUE((*client_->Lookup(prompt_, {}))->Validate().ok());
  }
}

TEST_P(FaultsTest, DaemonKilledUnderAReaderTakesNoMappedPageAway) {
  Start();
  const auto prefix = *client_->Lookup(prompt_, {});
  ASSERT_TRUE(prefix->Validate().ok());
  std::vector<std::byte> before(profile_->geometry().PageBytes(PageEncoding::kInt2));
  ASSERT_TRUE(prefix->CopyPage(PageIdx(3), PageEncoding::kInt2, before).ok());
  std::atomic<bool> stop{false};
  std::atomic<int> rounds{0};
  std::thread reader([&] {
    std::vector<std::byte> image(before.size());
    for (; !stop; ++rounds) {
      EXPECT_TRUE(prefix->CopyPage(PageIdx(3), PageEncoding::kInt2, image).ok());
      EXPECT_TRUE(image == before);
    }
  });
  const absl::Cleanup join = [&] {
    stop = true;
    reader.join();
  };
  WaitFor([&] { return rounds > 10; });
  daemon_->Kill();
  const int at_death = rounds;
  WaitFor([&] { return rounds > at_death + 10; });
  WaitFor([&] { return prefix->Validate().code() == absl::StatusCode::kFailedPrecondition; });
}

TEST_P(FaultsTest, DaemonStoppedForLongerThanALeaseEndsPrefixesAndServesOn) {
  Start({"--store.lease=1s"});
  const auto prefix = *client_->Lookup(prompt_, {});
  ASSERT_TRUE(prefix->Validate().ok());
  StopDaemon();
  const absl::Time stopped = Clock::System().Now();
  EXPECT_TRUE(prefix->Validate().ok()) << "the lease has time left";
  // On the engine's own clock: the daemon cannot say so.
  WaitFor([&] { return prefix->Validate().code() == absl::StatusCode::kFailedPrecondition; });
  WaitFor([&] { return Clock::System().Now() - stopped > absl::Seconds(2.5); });
  const absl::Time began = Clock::System().Now();
  const absl::Status late = client_->Lookup(prompt_, {.timeout = absl::Milliseconds(300)}).status();
  EXPECT_THAT(late.code(),
              AnyOf(absl::StatusCode::kDeadlineExceeded, absl::StatusCode::kUnavailable))
      << late;
  EXPECT_LT(Clock::System().Now() - began, absl::Seconds(2));

  daemon_->Signal(SIGCONT);
  std::shared_ptr<PrefixHandle> next;
  WaitFor([&] {
    auto found = client_->Lookup(prompt_, {});
    next = found.ok() ? *std::move(found) : nullptr;
    return next != nullptr;
  });
  EXPECT_EQ(next->matched_tokens(), 512u);
  EXPECT_TRUE(next->Validate().ok()) << next->Validate();
  EXPECT_EQ(prefix->Validate().code(), absl::StatusCode::kFailedPrecondition) << "once over, over";
  const auto published =
      client_->Publish(*sequence_, std::span(prompt_).first(512), {.context_key = "other"});
  EXPECT_TRUE(published.ok()) << published.status();
}

}  // namespace
}  // namespace crumb
