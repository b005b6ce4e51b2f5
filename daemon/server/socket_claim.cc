// SPDX-License-Identifier: Apache-2.0
#include "daemon/server/socket_claim.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"

#include "proto/base/status_macros.h"

namespace crumb {
namespace {

absl::Status InUse(const std::string& path) {
  return absl::FailedPreconditionError(
      absl::StrCat("another crumbd is listening on ", path,
                   ": stop it, or give this one another [listen] unix_socket"));
}

absl::Status CheckDirectory(const std::string& path) {
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  const std::string directory = parent.empty() ? "." : parent.string();
  std::error_code error;
  if (!std::filesystem::is_directory(directory, error)) {
    return absl::FailedPreconditionError(
        absl::StrCat("the directory ", directory, " of Unix socket ", path,
                     " is not there: create it (systemd: RuntimeDirectory=crumb), or set another "
                     "[listen] unix_socket"));
  }
  if (access(directory.c_str(), W_OK | X_OK) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("the directory ", directory, " of Unix socket ", path,
                     " is not writable by this user (", std::generic_category().message(errno),
                     "): change its owner, or set another [listen] unix_socket"));
  }
  return absl::OkStatus();
}

// Whether someone accepts connections at the path, by whichever kind of Unix socket.
bool IsAlive(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  for (const int type : {SOCK_STREAM, SOCK_SEQPACKET}) {
    const UniqueFd probe(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int result =
        connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
    // Refused: its owner is dead. Of the wrong type: ask by the other. All else is a live one.
    if (result == 0 || (errno != ECONNREFUSED && errno != EPROTOTYPE && errno != ENOENT)) {
      return true;
    }
  }
  return false;
}

absl::Status RemoveStale(const std::string& path) {
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0) {
    return absl::OkStatus();
  }
  if (!S_ISSOCK(info.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path,
                     " is there and is no socket: remove it, or set another [listen] "
                     "unix_socket"));
  }
  if (IsAlive(path)) {
    return InUse(path);
  }
  if (unlink(path.c_str()) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the stale socket ", path, " cannot be removed: ", std::generic_category().message(errno)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SocketClaim> SocketClaim::Take(const std::string& path) {
  const std::string memory_path = path + ".mem";
  constexpr size_t kMaxPathBytes = sizeof(sockaddr_un::sun_path) - 1;
  if (memory_path.size() > kMaxPathBytes) {
    return absl::FailedPreconditionError(absl::StrCat(
        "Unix socket ", path, ": with .mem the path has ", memory_path.size(),
        " bytes, the system allows ", kMaxPathBytes, ": set a shorter [listen] unix_socket"));
  }
  CRUMB_RETURN_IF_ERROR(CheckDirectory(path));
  const std::string lock_path = path + ".lock";
  UniqueFd lock(open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock.is_valid()) {
    return absl::FailedPreconditionError(
        absl::StrCat("lock file ", lock_path, ": ", std::generic_category().message(errno)));
  }
  if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    return InUse(path);
  }
  CRUMB_RETURN_IF_ERROR(RemoveStale(path));
  CRUMB_RETURN_IF_ERROR(RemoveStale(memory_path));
  return SocketClaim(std::move(lock));
}

}  // namespace crumb
