// SPDX-License-Identifier: Apache-2.0
//
// Parts of a valid profile to make files from, and files to spoil: each test changes one thing.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "crumb/cuda/profile.h"

namespace crumb {

// Two layers, two KV heads, K of 32 and V of 64: small, and no two extents alike that could be
// mistaken for each other.
ProfileParts SmallParts(CodecId codec, bool per_head = true);

// A file's three pieces, to be changed and joined again; the length follows the header unless told.
struct SplitFile {
  std::string header;  // JSON.
  std::vector<std::byte> data;

  static SplitFile Of(const std::vector<std::byte>& file);
  std::vector<std::byte> Join() const { return JoinWithLength(header.size()); }
  std::vector<std::byte> JoinWithLength(uint64_t length) const;
  // Replaces the first occurrence; aborts if there is none.
  SplitFile& Replace(const std::string& from, const std::string& to);
};

}  // namespace crumb
