// SPDX-License-Identifier: Apache-2.0
//
// The entries of a zip archive that compresses nothing, as torch.save writes them. libzip reads the
// archive and checks each entry's CRC-32; what is bounded is bounded here. Thread-safe.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace crumb::checkpoint {

inline constexpr size_t kMaxZipEntries = 1 << 18;

// By name, with the folder: "archive/data/0".
using ZipEntries = std::map<std::string, std::vector<std::byte>>;

// INVALID_ARGUMENT names the entry, what it says and the limit: no archive or a truncated one, an
// entry that is compressed, encrypted, there twice, or whose bytes have another CRC, and entries
// that claim more bytes together than the file has (a zip bomb).
absl::StatusOr<ZipEntries> ReadStoredEntries(std::span<const std::byte> file);

}  // namespace crumb::checkpoint
