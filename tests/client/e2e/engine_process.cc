// SPDX-License-Identifier: Apache-2.0
#include "tests/client/e2e/engine_process.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <utility>

#include "absl/strings/str_cat.h"

#include "tests/support/program_path.h"

extern char** environ;  // NOLINT(readability-identifier-naming): POSIX.

namespace crumb {

absl::StatusOr<EngineProcess> EngineProcess::Start(const std::string& address,
                                                   const std::string& data_plane,
                                                   const std::string& name) {
  int to[2];
  int from[2];
  if (::pipe2(to, O_CLOEXEC) != 0 || ::pipe2(from, O_CLOEXEC) != 0) {
    return absl::InternalError("pipe2");
  }
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, to[0], STDIN_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, from[1], STDOUT_FILENO);
  std::string program = ProgramPath(name).string();
  std::string where = address;
  std::string how = data_plane;
  std::array<char*, 4> arguments = {program.data(), where.data(), how.data(), nullptr};
  EngineProcess engine;
  const int error =
      ::posix_spawn(&engine.pid_, program.c_str(), &actions, nullptr, arguments.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  ::close(to[0]);
  ::close(from[1]);
  engine.to_ = ::fdopen(to[1], "w");
  engine.from_ = ::fdopen(from[0], "r");
  if (error != 0) {
    engine.pid_ = -1;
    return absl::InternalError(absl::StrCat("posix_spawn of ", program, ": error ", error));
  }
  if (const std::string line = engine.ReadLine(); line != "attached") {
    return absl::UnavailableError(absl::StrCat("engine: ", line));
  }
  return engine;
}

EngineProcess::EngineProcess(EngineProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      to_(std::exchange(other.to_, nullptr)),
      from_(std::exchange(other.from_, nullptr)) {}

void EngineProcess::Send(const std::string& command) {
  std::fputs(absl::StrCat(command, "\n").c_str(), to_);
  std::fflush(to_);
}

std::string EngineProcess::ReadLine() {
  std::string line;
  for (int c = std::fgetc(from_); c != EOF && c != '\n'; c = std::fgetc(from_)) {
    line.push_back(static_cast<char>(c));
  }
  return line;
}

void EngineProcess::Signal(int signal) const {
  ::kill(pid_, signal);
}

void EngineProcess::Kill() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  for (FILE** file : {&to_, &from_}) {
    if (*file != nullptr) {
      std::fclose(std::exchange(*file, nullptr));
    }
  }
}

}  // namespace crumb
