// SPDX-License-Identifier: Apache-2.0
//
// Where a daemon's control plane is reached: "unix:PATH" or "HOST:PORT". Thread-safe.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace crumb {

// INVALID_ARGUMENT: of neither form, or a path that no Unix socket can have; says how to write it.
// Whether anyone answers there is not asked.
absl::Status CheckServiceAddress(absl::string_view address);

}  // namespace crumb
