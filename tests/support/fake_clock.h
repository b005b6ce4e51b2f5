// SPDX-License-Identifier: Apache-2.0
//
// Time that passes when a test says so.
#pragma once

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "proto/base/clock.h"

namespace crumb {

// Thread-safe.
class FakeClock : public Clock {
 public:
  absl::Time Now() const override {
    absl::MutexLock lock(&mutex_);
    return now_;
  }
  void Advance(absl::Duration duration) {
    absl::MutexLock lock(&mutex_);
    now_ += duration;
  }

 private:
  mutable absl::Mutex mutex_;
  absl::Time now_ = absl::UnixEpoch() + absl::Hours(1);
};

}  // namespace crumb
