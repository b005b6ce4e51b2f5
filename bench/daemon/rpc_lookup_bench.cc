// SPDX-License-Identifier: Apache-2.0
//
// A lookup as an engine feels it: the longest match of a 100,000-token prompt through gRPC over the
// Unix socket, in a daemon of another process that holds 1,000,000 pages of 2,000 tenants. Beside
// it, what a plain Unix socket takes to bring as many bytes there and the page table's back. The
// two are measured in turns. Pages hold no bytes: no lookup touches them.
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"

#include "bench/daemon/prompt_corpus.h"
#include "bench/support/figure.h"
#include "bench/support/must.h"
#include "client/session/control_plane.h"
#include "daemon/log/log.h"
#include "daemon/server/server.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/unique_fd.h"
#include "tests/support/test_profile.h"

namespace crumb {
namespace {

using bench::PromptCorpus;

constexpr size_t kPromptTokens = 100'000;
constexpr size_t kEngines = 50;  // Each of another tenant, in turns: 20 MB of prompts.
constexpr int kRounds = 40;
constexpr size_t kTableBytes = PromptCorpus::kDocumentPages * 16;  // About what a reply takes.

absl::Time Now() {
  return Clock::System().Now();
}
absl::Time Soon() {
  return Now() + absl::Seconds(60);
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::string TenantName(size_t tenant) {
  return absl::StrCat("tenant-", tenant);
}

// One small model, so that pages are small; nothing of this depends on their size.
std::shared_ptr<const Profile> SmallProfile() {
  return MakeTestProfile(
      {.geometry = {.num_layers = 1, .num_kv_heads = 1, .key_dim = 32, .value_dim = 32},
       .windows = {.sink_tokens = 64, .recent_tokens = 0}});
}

void Fill(PageStore& store, const PromptCorpus& corpus, const Profile& profile) {
  SessionId session;
  std::string attached;
  corpus.ForEachPublish([&](size_t tenant, std::span<const uint32_t> prompt) {
    if (const std::string name = TenantName(tenant); name != attached) {
      store.EndSession(session);
      session =
          Must(store.OpenSession({.client_name = "bench",
                                  .pid = 0,
                                  .tenant = name,
                                  .profile = {profile.id(), profile.geometry(), profile.windows()},
                                  .heads = {}}));
      attached = name;
    }
    const PublishPlan plan = Must(store.BeginPublish(session, "", prompt));
    std::vector<WrittenBlock> written;
    for (const PageKey& key : plan.missing) {
      written.push_back({.page = key.page, .encoding = key.encoding, .head_crc32c = {0}});
    }
    Must(store.CommitPublish(session, plan.id, written));
  });
  store.EndSession(session);
}

// The daemon's process, from its fork to its end: serves until `stop` is closed.
[[noreturn]] void Serve(const std::filesystem::path& socket, int ready, int stop) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
#ifdef NDEBUG
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);  // As crumbd does.
#endif
  InitLog(LogLevel::kOff, LogFormat::kText);
  Config config;
  config.unix_socket = socket;
  config.metrics.clear();
  config.store.capacity_bytes = size_t{16} << 30;  // Of which hardly any is touched.
  const auto server = Must(Server::Start(config, Clock::System()));
  Fill(server->store(), PromptCorpus(), *SmallProfile());
  char byte = 0;
  CRUMB_CHECK(write(ready, &byte, 1) == 1, "the parent waits");
  while (read(stop, &byte, 1) > 0) {
  }
  server->Drain();
  _exit(0);
}

// Ends the daemon when destroyed.
class ForkedDaemon {
 public:
  // Before any thread is made. Returns when the store is full.
  ForkedDaemon() {
    std::string pattern = (std::filesystem::temp_directory_path() / "crumb-XXXXXX").string();
    CRUMB_CHECK(mkdtemp(pattern.data()) != nullptr, "a temporary directory can be made");
    directory_ = pattern;
    int ready[2];
    int stop[2];
    CRUMB_CHECK(pipe(ready) == 0 && pipe(stop) == 0, "two pipes");
    pid_ = fork();
    if (pid_ == 0) {
      close(ready[0]);
      close(stop[1]);
      Serve(socket(), ready[1], stop[0]);
    }
    close(ready[1]);
    close(stop[0]);
    stop_ = UniqueFd(stop[1]);
    char byte = 0;
    CRUMB_CHECK(pid_ > 0 && read(ready[0], &byte, 1) == 1, "the daemon starts");
    close(ready[0]);
  }
  ~ForkedDaemon() {
    stop_ = UniqueFd();
    waitpid(pid_, nullptr, 0);
    std::filesystem::remove_all(directory_);
  }
  ForkedDaemon(const ForkedDaemon&) = delete;
  ForkedDaemon& operator=(const ForkedDaemon&) = delete;

  std::string socket() const { return directory_ / "crumbd.sock"; }

 private:
  std::filesystem::path directory_;
  UniqueFd stop_;
  pid_t pid_ = -1;
};

// One rank of a tenant with a document.
class Engine {
 public:
  Engine(const std::string& socket, size_t document, const std::shared_ptr<const Profile>& profile)
      : control_(ControlPlane::Create("unix:" + socket)) {
    Must(control_->Attach({.client_name = "rpc_lookup_bench",
                           .tenant = TenantName(PromptCorpus::TenantOf(document)),
                           .profile = profile,
                           .heads = {0, 1}}));
  }

  // Microseconds of the lookup. The release is not measured.
  double Lookup(std::span<const uint32_t> prompt) {
    const absl::Time began = Now();
    const FoundPrefix found = Must(control_->Lookup({.context_key = "", .tokens = prompt}, Soon()));
    const double taken = absl::ToDoubleMicroseconds(Now() - began);
    CRUMB_CHECK(found.pages.size() == PromptCorpus::kDocumentPages, "all of the document is found");
    Must(control_->ReleaseLeases({&found.lease, 1}, Soon()));
    return taken;
  }

 private:
  std::unique_ptr<ControlPlane> control_;
};

// Sends as many bytes as a lookup to another thread, and gets as many back.
class PlainSocket {
 public:
  PlainSocket() {
    int ends[2];
    CRUMB_CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "a socket pair");
    near_ = UniqueFd(ends[0]);
    thread_ = std::thread([far = UniqueFd(ends[1])] {
      std::vector<char> buffer(kPromptTokens * sizeof(uint32_t));
      while (Receive(far.get(), buffer)) {
        Send(far.get(), std::span(buffer).first(kTableBytes));
      }
    });
  }
  ~PlainSocket() {
    near_ = UniqueFd();
    thread_.join();
  }
  PlainSocket(const PlainSocket&) = delete;
  PlainSocket& operator=(const PlainSocket&) = delete;

  // Microseconds.
  double RoundTrip(std::span<const uint32_t> prompt) {
    const absl::Time began = Now();
    Send(near_.get(), {reinterpret_cast<const char*>(prompt.data()), prompt.size_bytes()});
    CRUMB_CHECK(Receive(near_.get(), table_), "an answer");
    return absl::ToDoubleMicroseconds(Now() - began);
  }

 private:
  static void Send(int fd, std::span<const char> bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = write(fd, bytes.data(), bytes.size());
      CRUMB_CHECK(sent > 0, "the other end lives");
      bytes = bytes.subspan(static_cast<size_t>(sent));
    }
  }
  static bool Receive(int fd, std::span<char> bytes) {
    while (!bytes.empty()) {
      const ssize_t got = read(fd, bytes.data(), bytes.size());
      if (got <= 0) {
        return false;
      }
      bytes = bytes.subspan(static_cast<size_t>(got));
    }
    return true;
  }

  UniqueFd near_;
  std::vector<char> table_ = std::vector<char>(kTableBytes);
  std::thread thread_;
};

void Measure() {
  const ForkedDaemon daemon;
  const std::shared_ptr<const Profile> profile = SmallProfile();  // shared: by all engines.
  std::vector<std::vector<uint32_t>> prompts = PromptCorpus().documents();
  std::vector<std::unique_ptr<Engine>> engines;
  for (size_t i = 0; i < kEngines; ++i) {
    engines.push_back(std::make_unique<Engine>(daemon.socket(), i, profile));
    prompts[i].resize(kPromptTokens, 1);  // A message that is no whole page follows.
  }
  PlainSocket plain;
  std::vector<double> lookups;
  std::vector<double> round_trips;
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < kEngines; ++i) {
      const double lookup = engines[i]->Lookup(prompts[i]);
      const double round_trip = plain.RoundTrip(prompts[(i + kEngines / 2) % kEngines]);
      if (round > 0) {  // The first connects, and makes buffers.
        lookups.push_back(lookup);
        round_trips.push_back(round_trip);
      }
    }
  }
  bench::Register("rpc/lookup_100k_tokens",
                  {.value = Median(lookups),
                   .limit = Median(round_trips),
                   .target = 400,
                   .unit = "us",
                   .limit_name = "as many bytes over a plain Unix socket and back",
                   .better = bench::Better::kLower});
}

}  // namespace
}  // namespace crumb

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 1;
  }
  crumb::Measure();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
