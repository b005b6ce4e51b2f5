// SPDX-License-Identifier: Apache-2.0
//
// crumbd's arguments: the configuration file, and one flag a key, which overrides the file.
#pragma once

#include <string>

#include "absl/status/statusor.h"

#include "daemon/server/config.h"

namespace crumb {

// What to do.
struct CommandLine {
  Config config;
  std::string text;  // Print this and leave, if not empty: --help, --version, --print-config.
};

// The file read is that of --config or, without, kDefaultConfigFile if it is there.
// INVALID_ARGUMENT names the flag, or the file and line, with the nearest known name.
inline constexpr const char* kDefaultConfigFile = "/etc/crumb/crumbd.toml";
absl::StatusOr<CommandLine> ParseCommandLine(int argc, const char* const* argv);

}  // namespace crumb
