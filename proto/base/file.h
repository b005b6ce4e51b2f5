// SPDX-License-Identifier: Apache-2.0
//
// Whole files: read within a bound, and written so that a reader sees the old bytes or the new ones
// and never a part. Blocking; Thread-safe.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace crumb {

// The bytes of a regular file. NOT_FOUND: none there; INVALID_ARGUMENT: not a regular file, or of
// more than `max_bytes`; otherwise the system's error. Messages name the path.
absl::StatusOr<std::vector<std::byte>> ReadFile(const std::filesystem::path& path,
                                                size_t max_bytes);

// All that a file, a pipe or a device gives until its end, as text that people wrote. Blocks as
// long as its writer does. NOT_FOUND: none there; INVALID_ARGUMENT: a folder, or more than
// `max_bytes`; otherwise the system's error. Messages name the path.
absl::StatusOr<std::string> ReadText(const std::filesystem::path& path, size_t max_bytes);

// Replaces `path` by a file of these bytes, or leaves all as it was: writes a temporary file beside
// it, syncs, renames, syncs the folder. Mode 0644 less the umask.
absl::Status WriteFileAtomically(const std::filesystem::path& path,
                                 std::span<const std::byte> bytes);

}  // namespace crumb
