// SPDX-License-Identifier: Apache-2.0
//
// What becomes of the UCX data plane when one of its ends is killed, stopped or fed with garbage,
// by tcp alone and with cma. Engines and daemon are processes of their own.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "client/transport/ucx_transport.h"
#include "proto/base/check.h"
#include "tests/support/transfer_pages.h"
#include "tests/support/transfer_process.h"

namespace crumb::testing {
namespace {

using ::testing::StartsWith;

// 32 pages of 884,736 bytes: long enough on their way to be met there.
constexpr Geometry kGeometry{.num_layers = 24, .num_kv_heads = 8, .key_dim = 128, .value_dim = 128};
constexpr uint32_t kPages = 32;

absl::Time In(absl::Duration duration) {
  return Clock::System().Now() + duration;
}

// transfer_client as a child.
class ClientProcess {
 public:
  ClientProcess(TransferProcess& daemon, const char* transports, int pulls) {
    const SessionAnswers answers = Ask(daemon);
    int to_client[2];
    int from_client[2];
    CRUMB_CHECK(pipe(to_client) == 0 && pipe(from_client) == 0, "pipes to the client");
    std::vector<std::string> arguments = {CRUMB_TRANSFER_CLIENT, transports,
                                          absl::StrCat(daemon.port()), daemon.version()};
    for (const uint32_t number : {kGeometry.num_layers, kGeometry.num_kv_heads, kGeometry.key_dim,
                                  0u, 1u, static_cast<uint32_t>(pulls)}) {
      arguments.push_back(absl::StrCat(number));
    }
    std::vector<char*> argv;
    for (std::string& argument : arguments) {
      argv.push_back(argument.data());
    }
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(to_client[0], STDIN_FILENO);
      dup2(from_client[1], STDOUT_FILENO);
      for (const int fd : {to_client[0], to_client[1], from_client[0], from_client[1]}) {
        close(fd);
      }
      execv(argv[0], argv.data());
      _exit(127);
    }
    close(to_client[0]);
    close(from_client[1]);
    const std::string lines = absl::StrCat(answers.session, "\n", answers.lookup, "\n");
    CRUMB_CHECK(
        write(to_client[1], lines.data(), lines.size()) == static_cast<ssize_t>(lines.size()),
        "the client's input");
    close(to_client[1]);
    output_ = fdopen(from_client[0], "r");
  }
  ~ClientProcess() {
    Signal(SIGKILL);
    waitpid(pid_, nullptr, 0);
    std::fclose(output_);
  }
  ClientProcess(const ClientProcess&) = delete;
  ClientProcess& operator=(const ClientProcess&) = delete;

  // Empty at the end of its output.
  std::string ReadLine() {
    char line[1024] = {};
    return std::fgets(line, sizeof(line), output_) == nullptr ? "" : line;
  }
  void Signal(int signal) const { kill(pid_, signal); }
  uint64_t session() const { return session_; }

 private:
  struct SessionAnswers {
    std::string session;
    std::string lookup;
  };
  SessionAnswers Ask(TransferProcess& daemon) {
    SessionAnswers answers;
    answers.session = daemon.Ask("session");
    session_ = std::stoull(answers.session.substr(sizeof("session")));
    answers.lookup = daemon.Ask(absl::StrCat("lookup ", session_, " 1 ", kPages));
    return answers;
  }

  pid_t pid_ = 0;
  std::FILE* output_ = nullptr;
  uint64_t session_ = 0;
};

class UcxFaultsTest : public ::testing::TestWithParam<const char*> {
 protected:
  void Start(const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {absl::StrCat("transports=", GetParam()), "layers=24",
                                          "heads=8", "dim=128", "sink_pages=0"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    daemon_ = std::make_unique<TransferProcess>(arguments);
    daemon_->Ask(absl::StrCat("publish 1 ", kPages));
    session_ = daemon_->OpenSession(profile_);
    options_.ucx.transports = GetParam();
    auto transport = ConnectUcxWithOptions(options_, session_, In(absl::Seconds(20)));
    ASSERT_TRUE(transport.ok()) << transport.status();
    transport_ = *std::move(transport);
  }
  absl::Status Pull(absl::Duration timeout) {
    const LeasedPrefix prefix = daemon_->Lookup(session_, 1, kPages);
    const auto source = transport_->Open(prefix, In(timeout));
    absl::Status status = source.ok() ? (*source)->Validate() : source.status();
    if (status.ok()) {
      EXPECT_EQ(CountWrongBlocks(**source, session_, prefix, 1), 0u);
    }
    daemon_->Ask(absl::StrCat("release ", session_.id.value(), " ", prefix.lease.value()));
    return status;
  }
  // True when the daemon comes to hold no page and to have at most `peers` connections.
  bool ComesToRest(uint64_t peers) {
    const absl::Time end = In(absl::Seconds(20));
    while (Clock::System().Now() < end) {
      const TransferProcess::Stats stats = daemon_->GetStats();
      if (stats.held_pages == 0 && stats.peers <= peers) {
        return true;
      }
    }
    return false;
  }

  const std::shared_ptr<const Profile> profile_ = MakeTransferProfile(kGeometry, 0);
  std::unique_ptr<TransferProcess> daemon_;
  SessionInfo session_;
  UcxTransportOptions options_;
  std::unique_ptr<PageTransport> transport_;
};

TEST_P(UcxFaultsTest, TwentyClientsKilledInAPullLeaveNothingBehind) {
  Start();
  for (int client = 0; client < 20; ++client) {
    ClientProcess process(*daemon_, GetParam(), 1000);
    ASSERT_THAT(process.ReadLine(), StartsWith("first"));
    process.Signal(SIGKILL);
    // What the daemon's control plane does when the session's stream breaks.
    daemon_->Ask(absl::StrCat("end ", process.session()));
    ASSERT_TRUE(daemon_->IsRunning()) << "after client " << client;
  }
  EXPECT_TRUE(ComesToRest(options_.num_links));
  const absl::Status status = Pull(absl::Seconds(20));
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(UcxFaultsTest, ADaemonKilledInAPullIsAnErrorByTheDeadline) {
  for (int round = 0; round < 3; ++round) {
    Start();
    const LeasedPrefix prefix = daemon_->Lookup(session_, 1, kPages);
    const absl::Time begin = Clock::System().Now();
    auto source = transport_->Open(prefix, In(absl::Seconds(5)));
    ASSERT_TRUE(source.ok());
    ASSERT_TRUE((*source)->WaitForLayer(0).ok());
    daemon_->Signal(SIGKILL);
    const absl::Status status = (*source)->Validate();
    if (status.ok()) {  // All bytes were there before.
      EXPECT_EQ(CountWrongBlocks(**source, session_, prefix, 1), 0u);
    } else {
      EXPECT_THAT(status.code(), ::testing::AnyOf(absl::StatusCode::kUnavailable,
                                                  absl::StatusCode::kDeadlineExceeded))
          << status;
    }
    EXPECT_LT(Clock::System().Now() - begin, absl::Seconds(6));
    source = transport_->Open(prefix, In(absl::Seconds(2)));
    EXPECT_FALSE(source.ok() && (*source)->Validate().ok());
    source = absl::CancelledError();
    transport_.reset();
  }
}

TEST_P(UcxFaultsTest, AStoppedDaemonIsAnErrorByTheDeadlineAndServesAgainAfterwards) {
  Start();
  const LeasedPrefix prefix = daemon_->Lookup(session_, 1, kPages);
  daemon_->Signal(SIGSTOP);
  const absl::Time begin = Clock::System().Now();
  const auto source = transport_->Open(prefix, In(absl::Milliseconds(500)));
  ASSERT_TRUE(source.ok());
  const absl::Status status = (*source)->Validate();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_LT(Clock::System().Now() - begin, absl::Seconds(2));
  const std::vector<std::byte> image(100000);
  const OutgoingPage page{PageIdx(0), PageEncoding::kBf16, image};
  const absl::Status sent =
      transport_->SendPages(PublishId(5), 0, {&page, 1}, In(absl::Milliseconds(300)));
  EXPECT_EQ(sent.code(), absl::StatusCode::kDeadlineExceeded) << sent;
  daemon_->Signal(SIGCONT);
  EXPECT_TRUE(Pull(absl::Seconds(20)).ok());
}

// The client sleeps in the middle of a pull while its lease runs out and the memory is given to
// other pages. Whatever it then believes must be what it asked for.
TEST_P(UcxFaultsTest, AClientStoppedBeyondItsLeaseNeverBelievesReusedMemory) {
  int lease_ms = 500;
  const auto start = [&] {
    transport_.reset();
    Start({absl::StrCat("lease_ms=", lease_ms), absl::StrCat("stall_ms=", lease_ms * 3 / 5),
           "capacity_mb=96"});
  };
  ASSERT_NO_FATAL_FAILURE(start());
  constexpr int kRounds = 5;
  constexpr int kMaxLeaseMs = 8000;
  int rounds = 0;
  int detected = 0;
  while (rounds < kRounds) {
    ClientProcess process(*daemon_, GetParam(), 1);
    const std::string begun = process.ReadLine();
    if (begun.starts_with("error") && lease_ms < kMaxLeaseMs) {
      lease_ms *= 2;  // A slow machine: the lease was over before the first layer came.
      ASSERT_NO_FATAL_FAILURE(start());
      continue;
    }
    ASSERT_THAT(begun, StartsWith("first"));
    ++rounds;
    process.Signal(SIGSTOP);
    // A connection over which nothing was under way need not be closed.
    ASSERT_TRUE(ComesToRest(2 * options_.num_links));
    daemon_->Ask("evict");
    daemon_->Ask(absl::StrCat("publish 2 ", kPages));
    process.Signal(SIGCONT);
    const std::string result = process.ReadLine();
    EXPECT_THAT(result, ::testing::AnyOf(StartsWith("right"), StartsWith("error")));
    detected += result.starts_with("error") ? 1 : 0;
    daemon_->Ask("evict");
    daemon_->Ask(absl::StrCat("publish 1 ", kPages));
  }
  RecordProperty("detected", detected);
}

TEST_P(UcxFaultsTest, RandomBytesAndHttpOnThePortChangeNothing) {
  Start();
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 60; ++i) {
    std::string bytes = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
    if (i % 3 != 0) {
      bytes.resize(random() % 4096);
      for (char& byte : bytes) {
        byte = static_cast<char>(random());
      }
    }
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(daemon_->port());
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    static_cast<void>(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL));
    close(fd);
  }
  EXPECT_TRUE(daemon_->IsRunning());
  const absl::Status status = Pull(absl::Seconds(20));
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(Transports,
                         UcxFaultsTest,
                         ::testing::Values("tcp", "cma,tcp"),
                         [](const auto& parameter) {
                           return std::string(parameter.param) == "tcp" ? "tcp" : "cma";
                         });

}  // namespace
}  // namespace crumb::testing
