// SPDX-License-Identifier: Apache-2.0
//
// An engine as a process of its own, for tests that stop and kill it: the program e2e_engine, which
// obeys one command a line and answers each with one line.
//
//   publish SEED TOKENS   "published ADDED PRESENT", or "error ..."
//   lookup SEED TOKENS    "found USABLE"; holds the prefix
//   validate              "OK", or the status of the prefix held
//   churn SEED            publishes and looks up for ever, a line for each round
//   read                  reads the prefix held for ever; "reading" once all was read
//
// In a session of its own, step by step (tests/client/e2e/raw_session.h):
//
//   find SEED TOKENS      "found MATCHED"
//   open                  brings what was found: "OK", or the status
//   stage SEED TOKENS     all of a publish but its commit: "staged", or "error ..."
//   commit                "committed ADDED", or "error ..."
//
// Before a command, "loud" has it say "begun" when it begins.
#pragma once

#include <sys/types.h>

#include <cstdio>
#include <string>

#include "absl/status/statusor.h"

namespace crumb {

// Confined to one thread. Kills the process when destroyed.
class EngineProcess {
 public:
  // Attached on return, with the test profile of tests/client/e2e/e2e_engine.cc.
  // `data_plane` is "map" or "ucx". `program` is one that obeys (tests/client/e2e/command_loop.h).
  static absl::StatusOr<EngineProcess> Start(const std::string& address,
                                             const std::string& data_plane = "map",
                                             const std::string& program = "e2e_engine");
  EngineProcess(EngineProcess&& other) noexcept;
  EngineProcess& operator=(EngineProcess&&) = delete;
  EngineProcess(const EngineProcess&) = delete;
  EngineProcess& operator=(const EngineProcess&) = delete;
  ~EngineProcess() { Kill(); }

  void Send(const std::string& command);
  // The next line of its answers; empty when it ended.
  std::string ReadLine();
  std::string Ask(const std::string& command) {
    Send(command);
    return ReadLine();
  }
  pid_t pid() const { return pid_; }
  void Signal(int signal) const;
  void Kill();

 private:
  EngineProcess() = default;

  pid_t pid_ = -1;
  FILE* to_ = nullptr;
  FILE* from_ = nullptr;
};

}  // namespace crumb
