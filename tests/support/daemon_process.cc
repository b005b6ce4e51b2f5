// SPDX-License-Identifier: Apache-2.0
#include "tests/support/daemon_process.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

#include "proto/base/check.h"
#include "proto/base/status_macros.h"
#include "tests/support/program_path.h"

extern char** environ;  // NOLINT: of unistd.h, which declares it only with extensions.

namespace crumb {
namespace {

std::filesystem::path MakeDirectory() {
  std::string pattern = (std::filesystem::temp_directory_path() / "crumb-XXXXXX").string();
  CRUMB_CHECK(mkdtemp(pattern.data()) != nullptr, "a temporary directory can be made");
  return pattern;
}

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Standard output and error go to files, which are appended to.
pid_t Spawn(const std::string& name,
            const std::vector<std::string>& arguments,
            const std::filesystem::path& out,
            const std::filesystem::path& err) {
  const std::string program = ProgramPath(name).string();
  std::vector<char*> argv = {const_cast<char*>(program.c_str())};
  for (const std::string& argument : arguments) {
    argv.push_back(const_cast<char*>(argument.c_str()));
  }
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  constexpr int kFlags = O_WRONLY | O_CREAT | O_APPEND;
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, out.c_str(), kFlags, 0600);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, err.c_str(), kFlags, 0600);
  pid_t pid = -1;
  const int error = posix_spawn(&pid, program.c_str(), &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    std::fprintf(stderr, "%s: %s: build it first\n", program.c_str(), std::strerror(error));
    std::abort();
  }
  return pid;
}

int ExitStatus(int wait_status) {
  return WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : -WTERMSIG(wait_status);
}

}  // namespace

absl::StatusOr<std::unique_ptr<DaemonProcess>> DaemonProcess::Start(DaemonProcessOptions options) {
  const bool owns = options.directory.empty();
  std::unique_ptr<DaemonProcess> daemon(
      new DaemonProcess(owns ? MakeDirectory() : options.directory, owns));
  // A daemon before this one has left its log, with its "ready".
  std::filesystem::remove(daemon->directory_ / "log");
  std::vector<std::string> arguments = {
      absl::StrCat("--listen.unix_socket=", daemon->socket_path().string()),
      "--listen.metrics=127.0.0.1:0"};
  arguments.insert(arguments.end(), options.flags.begin(), options.flags.end());
  const std::filesystem::path log = daemon->directory_ / "log";
  daemon->pid_ = Spawn("crumbd", arguments, log, log);
  CRUMB_RETURN_IF_ERROR(daemon->WaitReady(options.timeout));
  return daemon;
}

DaemonProcess::~DaemonProcess() {
  Kill();
  if (owns_directory_) {
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }
}

absl::Status DaemonProcess::WaitReady(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (Log().find(" ready ") == std::string::npos) {
    if (absl::StatusOr<int> status = Wait(absl::Milliseconds(5)); status.ok()) {
      return absl::UnavailableError(
          absl::StrCat("crumbd ended with ", *status, " before it was ready:\n", Log()));
    }
    if (absl::Now() > deadline) {
      return absl::UnavailableError(absl::StrCat("crumbd is not ready in time:\n", Log()));
    }
  }
  return absl::OkStatus();
}

int DaemonProcess::ReadyNumber(const std::string& key) const {
  const std::string log = Log();
  const size_t ready = log.find(" ready ");
  const size_t found = ready == std::string::npos ? ready : log.find(" " + key + "=", ready);
  return found == std::string::npos ? -1 : std::atoi(log.c_str() + found + key.size() + 2);
}

std::string DaemonProcess::Log() const {
  return ReadFile(directory_ / "log");
}

void DaemonProcess::Signal(int signal) {
  CRUMB_CHECK(pid_ > 0, "the daemon runs");
  kill(pid_, signal);
}

absl::StatusOr<int> DaemonProcess::Wait(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (pid_ > 0) {
    int wait_status = 0;
    if (waitpid(pid_, &wait_status, WNOHANG) == pid_) {
      pid_ = -1;
      exit_status_ = ExitStatus(wait_status);
      break;
    }
    if (absl::Now() > deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("crumbd still runs after ", absl::FormatDuration(timeout)));
    }
    absl::SleepFor(absl::Milliseconds(1));
  }
  return exit_status_;
}

absl::StatusOr<int> DaemonProcess::Stop(absl::Duration timeout) {
  Signal(SIGTERM);
  return Wait(timeout);
}

void DaemonProcess::Kill() {
  if (pid_ > 0) {
    Signal(SIGKILL);
    Signal(SIGCONT);  // A stopped process dies too, but is then reported at once.
    static_cast<void>(Wait(absl::Seconds(30)));
  }
}

ProgramResult RunProgram(const std::string& name, const std::vector<std::string>& arguments) {
  const std::filesystem::path directory = MakeDirectory();
  const pid_t pid = Spawn(name, arguments, directory / "out", directory / "err");
  int wait_status = 0;
  while (waitpid(pid, &wait_status, 0) != pid && errno == EINTR) {
  }
  ProgramResult result{ExitStatus(wait_status), ReadFile(directory / "out"),
                       ReadFile(directory / "err")};
  std::filesystem::remove_all(directory);
  return result;
}

}  // namespace crumb
