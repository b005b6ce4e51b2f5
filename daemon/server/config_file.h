// SPDX-License-Identifier: Apache-2.0
//
// Reads the configuration file, TOML.
#pragma once

#include <string>

#include "absl/status/status.h"

#include "daemon/server/config.h"

namespace crumb {

// Sets in `config` what the file says. NOT_FOUND: no such file. INVALID_ARGUMENT, naming the file,
// the line and the key: no TOML, an unknown section or key (with the nearest known one), a value of
// another type or out of bounds.
absl::Status LoadConfigFile(const std::string& path, Config& config);

// The same for text; `name` stands for the file in messages.
absl::Status LoadConfigText(const std::string& text, const std::string& name, Config& config);

}  // namespace crumb
