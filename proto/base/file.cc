// SPDX-License-Identifier: Apache-2.0
#include "proto/base/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"

#include "proto/base/status_macros.h"
#include "proto/base/unique_fd.h"

namespace crumb {
namespace {

absl::Status SystemError(const char* what, const std::filesystem::path& path) {
  return absl::ErrnoToStatus(errno, absl::StrCat(what, " ", path.string()));
}

absl::Status WriteAll(int fd, std::span<const std::byte> bytes, const std::filesystem::path& path) {
  while (!bytes.empty()) {
    const ssize_t written = write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written < 0) {
      return SystemError("cannot write", path);
    }
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

// Without this a crash could take the rename back after it was reported.
absl::Status SyncFolder(const std::filesystem::path& path) {
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  const UniqueFd fd(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.is_valid() || fsync(fd.get()) != 0) {
    return SystemError("cannot sync folder", folder);
  }
  return absl::OkStatus();
}

// A file of this process alone, beside `path` and named after it.
absl::StatusOr<UniqueFd> CreateTemporary(const std::filesystem::path& path,
                                         std::string* temporary) {
  static std::atomic<uint64_t> counter{0};
  constexpr int kAttempts = 100;  // What a crash left under our process id may be in the way.
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    *temporary = absl::StrCat(path.string(), ".", getpid(), ".", counter.fetch_add(1), ".tmp");
    UniqueFd fd(open(temporary->c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (fd.is_valid()) {
      return fd;
    }
    if (errno != EEXIST) {
      break;
    }
  }
  return SystemError("cannot create", *temporary);
}

absl::Status WriteSynced(int fd,
                         std::span<const std::byte> bytes,
                         const std::filesystem::path& path) {
  CRUMB_RETURN_IF_ERROR(WriteAll(fd, bytes, path));
  return fsync(fd) == 0 ? absl::OkStatus() : SystemError("cannot sync", path);
}

}  // namespace

absl::StatusOr<std::vector<std::byte>> ReadFile(const std::filesystem::path& path,
                                                size_t max_bytes) {
  // NONBLOCK, so that a fifo is refused below and not waited for.
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.is_valid()) {
    return SystemError("cannot open", path);
  }
  struct stat info {};
  if (fstat(fd.get(), &info) != 0) {
    return SystemError("cannot stat", path);
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path.string(), " is not a regular file"));
  }
  const auto size = static_cast<uint64_t>(info.st_size);
  if (size > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path.string(), " has ", size, " bytes; at most ", max_bytes, " are read"));
  }
  std::vector<std::byte> bytes(size);
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got = read(fd.get(), bytes.data() + done, bytes.size() - done);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      return SystemError("cannot read", path);
    }
    if (got == 0) {
      break;  // Cut shorter since; the reader of the bytes will see.
    }
    done += static_cast<size_t>(got);
  }
  bytes.resize(done);
  return bytes;
}

absl::StatusOr<std::string> ReadText(const std::filesystem::path& path, size_t max_bytes) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.is_valid()) {
    return SystemError("cannot open", path);
  }
  std::string text;
  std::array<char, size_t{64} << 10> piece{};
  for (;;) {
    const ssize_t got = read(fd.get(), piece.data(), piece.size());
    if (got == 0) {
      return text;
    }
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0 && errno == EISDIR) {
      return absl::InvalidArgumentError(
          absl::StrCat(path.string(), " is a folder: name a file in it"));
    }
    if (got < 0) {
      return SystemError("cannot read", path);
    }
    if (static_cast<size_t>(got) > max_bytes - text.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat(path.string(), " has more than the ", max_bytes, " bytes that are read"));
    }
    text.append(piece.data(), static_cast<size_t>(got));
  }
}

absl::Status WriteFileAtomically(const std::filesystem::path& path,
                                 std::span<const std::byte> bytes) {
  std::string temporary;
  CRUMB_ASSIGN_OR_RETURN(const UniqueFd fd, CreateTemporary(path, &temporary));
  absl::Status status = WriteSynced(fd.get(), bytes, temporary);
  if (status.ok() && rename(temporary.c_str(), path.c_str()) != 0) {
    status = absl::ErrnoToStatus(errno,
                                 absl::StrCat("cannot rename ", temporary, " to ", path.string()));
  }
  if (!status.ok()) {
    unlink(temporary.c_str());
    return status;
  }
  return SyncFolder(path);
}

}  // namespace crumb
