// SPDX-License-Identifier: Apache-2.0
//
// Time, handed to whoever needs it, so that tests need no sleeps. Nothing else in Crumb asks the
// system for the time of a decision.
#pragma once

#include "absl/time/time.h"

namespace crumb {

// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;

  // Monotonic: never goes back, keeps running while the process is stopped. For deadlines and ages;
  // its zero has no meaning.
  virtual absl::Time Now() const = 0;

  // The system's. Never fails, lives for ever.
  static const Clock& System();
};

}  // namespace crumb
