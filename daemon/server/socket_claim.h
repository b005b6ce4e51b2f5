// SPDX-License-Identifier: Apache-2.0
//
// The right to a Unix socket's path: held by one daemon at a time, also when two start at once.
#pragma once

#include <string>
#include <utility>

#include "absl/status/statusor.h"

#include "proto/base/unique_fd.h"

namespace crumb {

// Holds a lock on the file PATH.lock, which stays behind: a lock is given back by the system when
// its holder dies, a file is not. Move-only.
class SocketClaim {
 public:
  // Takes the path, and removes what a dead daemon left at it and at PATH.mem. Whoever is to know
  // whether a daemon is alive tries to connect; so does this. FAILED_PRECONDITION: another daemon
  // has it, something that is no socket lies there, or the directory is missing or not writable;
  // names the path and the remedy.
  static absl::StatusOr<SocketClaim> Take(const std::string& path);

 private:
  explicit SocketClaim(UniqueFd lock) : lock_(std::move(lock)) {}

  UniqueFd lock_;
};

}  // namespace crumb
