// SPDX-License-Identifier: Apache-2.0
#include "tests/support/transfer_process.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

#include "proto/base/check.h"
#include "tests/support/transfer_pages.h"

namespace crumb::testing {

SessionInfo ParseSession(const std::string& answer,
                         uint16_t port,
                         const std::string& version,
                         std::shared_ptr<const Profile> profile) {
  std::istringstream words(answer);
  std::string word;
  std::string secret;
  uint64_t id = 0;
  words >> word >> id >> secret;
  SessionInfo session;
  session.id = SessionId(id);
  const std::string bytes = absl::HexStringToBytes(secret);
  CRUMB_CHECK(word == "session" && bytes.size() == session.secret.size(), answer.c_str());
  std::memcpy(session.secret.data(), bytes.data(), bytes.size());
  session.ucx_host = "127.0.0.1";
  session.ucx_port = port;
  session.ucx_version = version;
  session.heads = {0, profile->geometry().num_kv_heads};
  session.profile = std::move(profile);
  return session;
}

LeasedPrefix ParseLookup(const std::string& answer, const SessionInfo& session) {
  std::istringstream words(answer);
  std::string word;
  uint64_t lease = 0;
  size_t num_pages = 0;
  words >> word >> lease >> num_pages;
  CRUMB_CHECK(word == "lease", answer.c_str());
  LeasedPrefix prefix;
  prefix.lease = LeaseId(lease);
  prefix.namespace_id = ComputeNamespaceId("default", session.profile->id(), "");
  prefix.pages.resize(num_pages);
  for (PagePlaces& page : prefix.pages) {
    for (BlockPlace* place : {&page.int2, &page.bf16}) {
      words >> word;
      if (word != "-") {
        // Which chunk does not matter over UCX, but that there is one.
        *place = {ChunkId(1), 0, Generation(std::stoull(word))};
      }
    }
  }
  return prefix;
}

size_t CountWrongBlocks(const PageSource& source,
                        const SessionInfo& session,
                        const LeasedPrefix& prefix,
                        uint32_t salt) {
  const Geometry& geometry = session.profile->geometry();
  size_t wrong = 0;
  for (uint32_t page = 0; page < prefix.pages.size(); ++page) {
    for (const PageEncoding encoding : {PageEncoding::kInt2, PageEncoding::kBf16}) {
      if (!prefix.pages[page].of(encoding).present()) {
        continue;
      }
      std::vector<std::byte> expected(geometry.HeadBlockBytes(encoding));
      for (uint32_t layer = 0; layer < geometry.num_layers; ++layer) {
        for (uint32_t head = 0; head < session.heads.count; ++head) {
          const uint32_t kv_head = session.heads.first + head;
          FillBlock(expected, salt, page, encoding, layer, kv_head);
          const std::byte* block = source.HeadBlock(PageIdx(page), encoding, layer, kv_head);
          wrong += block == nullptr || std::memcmp(block, expected.data(), expected.size()) != 0;
        }
      }
    }
  }
  return wrong;
}

TransferProcess::TransferProcess(std::vector<std::string> arguments) {
  int to_daemon[2];
  int from_daemon[2];
  CRUMB_CHECK(pipe(to_daemon) == 0 && pipe(from_daemon) == 0, "pipes to the daemon");
  arguments.insert(arguments.begin(), CRUMB_TRANSFER_DAEMON);
  std::vector<char*> argv;
  for (std::string& argument : arguments) {
    argv.push_back(argument.data());
  }
  argv.push_back(nullptr);
  pid_ = fork();
  CRUMB_CHECK(pid_ >= 0, "fork");
  if (pid_ == 0) {
    dup2(to_daemon[0], STDIN_FILENO);
    dup2(from_daemon[1], STDOUT_FILENO);
    for (const int fd : {to_daemon[0], to_daemon[1], from_daemon[0], from_daemon[1]}) {
      close(fd);
    }
    execv(argv[0], argv.data());
    std::perror(argv[0]);
    _exit(127);
  }
  close(to_daemon[0]);
  close(from_daemon[1]);
  commands_ = fdopen(to_daemon[1], "w");
  answers_ = fdopen(from_daemon[0], "r");
  char line[256] = {};
  unsigned port = 0;
  char version[64] = {};
  CRUMB_CHECK(std::fgets(line, sizeof(line), answers_) != nullptr &&
                  std::sscanf(line, "ready %u %63s", &port, version) == 2,
              "the daemon is ready");
  port_ = static_cast<uint16_t>(port);
  version_ = version;
}

TransferProcess::~TransferProcess() {
  std::fclose(commands_);
  std::fclose(answers_);
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

std::string TransferProcess::Ask(const std::string& command) {
  CRUMB_CHECK(std::fprintf(commands_, "%s\n", command.c_str()) > 0, "a command");
  std::fflush(commands_);
  std::string answer;
  for (int c = std::fgetc(answers_); c != '\n'; c = std::fgetc(answers_)) {
    CRUMB_CHECK(c != EOF, command.c_str());
    answer.push_back(static_cast<char>(c));
  }
  return answer;
}

SessionInfo TransferProcess::OpenSession(std::shared_ptr<const Profile> profile) {
  return ParseSession(Ask("session"), port_, version_, std::move(profile));
}

LeasedPrefix TransferProcess::Lookup(const SessionInfo& session, uint32_t salt, uint32_t pages) {
  return ParseLookup(Ask(absl::StrCat("lookup ", session.id.value(), " ", salt, " ", pages)),
                     session);
}

TransferProcess::Stats TransferProcess::GetStats() {
  std::istringstream answer(Ask("stats"));
  std::string word;
  Stats stats;
  answer >> word >> stats.pulls >> stats.peers >> stats.refused >> stats.held_pages >>
      stats.staging_bytes >> stats.sent_bytes >> stats.pulled >> stats.pushed;
  return stats;
}

void TransferProcess::Signal(int signal) const {
  CRUMB_CHECK(kill(pid_, signal) == 0, "a signal to the daemon");
  if (signal == SIGSTOP) {
    siginfo_t info{};
    CRUMB_CHECK(waitid(P_PID, static_cast<id_t>(pid_), &info, WSTOPPED | WEXITED | WNOWAIT) == 0,
                "the daemon stops");
  }
}

bool TransferProcess::IsRunning() const {
  siginfo_t info{};
  return waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
         info.si_pid == 0;
}

double TransferProcess::CpuSeconds() const {
  std::ifstream file(absl::StrCat("/proc/", pid_, "/stat"));
  std::string text;
  std::getline(file, text);
  std::istringstream fields(text.substr(text.rfind(')') + 2));
  std::string skipped;
  for (int field = 0; field < 11; ++field) {
    fields >> skipped;
  }
  double user = 0;
  double system = 0;
  fields >> user >> system;
  return (user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

}  // namespace crumb::testing
