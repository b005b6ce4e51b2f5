// SPDX-License-Identifier: Apache-2.0
//
// crumbd. Exit status: 0 after a clean drain, 1 if it could not start, 2 for wrong arguments or a
// wrong configuration, 128 + signal when a second signal cut the drain short.
#include <pthread.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>

#include "absl/synchronization/mutex.h"

#include "daemon/log/log.h"
#include "daemon/server/command_line.h"
#include "daemon/server/server.h"
#include "proto/base/clock.h"

namespace {

// Blocks SIGTERM and SIGINT in this thread and in those that it will start, so that they are only
// taken by WaitForSignal.
sigset_t BlockSignals() {
  std::signal(SIGPIPE, SIG_IGN);  // A peer that leaves is an error of its call, not our end.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return signals;
}

int WaitForSignal(const sigset_t& signals) {
  int signal = 0;
  while (sigwait(&signals, &signal) != 0) {
  }
  return signal;
}

int Run(const crumb::Config& config) {
  using crumb::LogEvent;
  using crumb::LogLevel;
  crumb::InitLog(config.log_level, config.log_format);
  const sigset_t signals = BlockSignals();
  auto server = crumb::Server::Start(config, crumb::Clock::System());
  if (!server.ok()) {
    LogEvent(LogLevel::kError, "cannot_start", {{"status", server.status()}});
    return 1;
  }
  const int signal = WaitForSignal(signals);
  LogEvent(LogLevel::kInfo, "signal", {{"name", signal == SIGTERM ? "SIGTERM" : "SIGINT"}});
  // The second signal does not wait for the first.
  std::thread([signals] { _exit(128 + WaitForSignal(signals)); }).detach();
  (*server)->Drain();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
#ifdef NDEBUG
  // Distributions build Abseil with its search for lock cycles, at every lock that is taken.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
#endif
  const auto line = crumb::ParseCommandLine(argc, argv);
  if (!line.ok()) {
    std::fprintf(stderr, "crumbd: %s\n", std::string(line.status().message()).c_str());
    return 2;
  }
  if (!line->text.empty()) {
    std::fputs(line->text.c_str(), stdout);
    return 0;
  }
  return Run(line->config);
}
