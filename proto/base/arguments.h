// SPDX-License-Identifier: Apache-2.0
//
// What every program checks of its arguments before a parser reads them. Thread-safe.
#pragma once

#include "absl/status/status.h"

namespace crumb {

// INVALID_ARGUMENT: a flag whose value is empty, as `--address=$UNSET` leaves it. CLI11 would take
// the argument behind it for the value. Arguments after `--` are no flags.
absl::Status CheckFlagsHaveValues(int argc, const char* const* argv);

}  // namespace crumb
