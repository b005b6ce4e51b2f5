// SPDX-License-Identifier: Apache-2.0
//
// Files of profiles, and what is said of them. For tests.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "crumb/cuda/profile.h"

namespace crumb {

// The file of these parts, which must be valid.
inline std::vector<std::byte> FileOf(const ProfileParts& parts) {
  auto file = Profile::Serialize(parts);
  EXPECT_TRUE(file.ok()) << file.status();
  return file.ok() ? *std::move(file) : std::vector<std::byte>();
}

// What a reader says of a file, and a writer of parts; "accepted" where they take it.
inline std::string ErrorOf(std::vector<std::byte> file) {
  const auto profile = Profile::Parse(std::move(file));
  if (profile.ok()) {
    return "accepted";
  }
  EXPECT_EQ(profile.status().code(), absl::StatusCode::kInvalidArgument) << profile.status();
  return std::string(profile.status().message());
}

inline std::string ErrorOf(const ProfileParts& parts) {
  const auto file = Profile::Serialize(parts);
  return file.ok() ? "accepted" : std::string(file.status().message());
}

}  // namespace crumb
