// SPDX-License-Identifier: Apache-2.0
#include "proto/base/clock.h"

#include <ctime>

namespace crumb {
namespace {

class SystemClock : public Clock {
 public:
  absl::Time Now() const override {
    // BOOTTIME, not MONOTONIC: a lease must also run out while the machine is suspended.
    timespec now{};
    clock_gettime(CLOCK_BOOTTIME, &now);
    return absl::UnixEpoch() + absl::DurationFromTimespec(now);
  }
};

}  // namespace

const Clock& Clock::System() {
  static const SystemClock kClock;
  return kClock;
}

}  // namespace crumb
