// SPDX-License-Identifier: Apache-2.0
//
// A real crumbd, in a folder of its own under the temporary directory, for end-to-end tests and
// benchmarks.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace crumb {

struct DaemonProcessOptions {
  // Flags besides the sockets and `--listen.metrics=127.0.0.1:0`, for example
  // "--store.capacity=64MiB".
  std::vector<std::string> flags = {};
  // Serve here instead of in a new folder: what a daemon that was killed left is found again.
  std::filesystem::path directory = {};
  absl::Duration timeout = absl::Seconds(30);  // To become ready.
};

// Confined to one thread. Kills the daemon when destroyed, and removes the folder that it made.
class DaemonProcess {
 public:
  // Ready on return. UNAVAILABLE: it ended before it was ready; the message has its log.
  static absl::StatusOr<std::unique_ptr<DaemonProcess>> Start(DaemonProcessOptions options = {});
  ~DaemonProcess();
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  const std::filesystem::path& directory() const { return directory_; }
  std::filesystem::path socket_path() const { return directory_ / "crumbd.sock"; }
  std::string address() const { return "unix:" + socket_path().string(); }  // For clients.
  pid_t pid() const { return pid_; }
  // The value of a number that the "ready" line of the log names, for example metrics_port.
  int ReadyNumber(const std::string& key) const;
  // What it has logged so far.
  std::string Log() const;

  void Signal(int signal);
  // Blocks until it ends. Its exit status, or -signal; DEADLINE_EXCEEDED.
  absl::StatusOr<int> Wait(absl::Duration timeout);
  // SIGTERM and Wait.
  absl::StatusOr<int> Stop(absl::Duration timeout = absl::Seconds(30));
  // SIGKILL and Wait. Its sockets stay behind.
  void Kill();

 private:
  DaemonProcess(std::filesystem::path directory, bool owns_directory)
      : directory_(std::move(directory)), owns_directory_(owns_directory) {}

  absl::Status WaitReady(absl::Duration timeout);

  std::filesystem::path directory_;
  bool owns_directory_;
  pid_t pid_ = -1;  // -1: not running.
  int exit_status_ = 0;
};

// Runs one of the programs beside the test (`crumbd`, `crumbctl`, ...) to its end.
struct ProgramResult {
  int exit_status = 0;  // Or -signal.
  std::string out;
  std::string err;
};
ProgramResult RunProgram(const std::string& name, const std::vector<std::string>& arguments);

}  // namespace crumb
