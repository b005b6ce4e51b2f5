// SPDX-License-Identifier: Apache-2.0
//
// Which units of a mapping have been asked for as huge pages. Neighbouring blocks lie in one unit,
// and different threads write them first: each unit is asked for once, by one of them, while others
// do theirs; two that ask for one at once get in each other's way, and small pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace crumb {

// Thread-safe.
class HugeUnits {
 public:
  // `mapping` begins at a huge page (MapAtHugePage), and outlives this.
  explicit HugeUnits(std::span<std::byte> mapping);

  // Has the system give the units that `bytes` touches, as AskForHugePages. Whether they are all
  // there then, and whole; else small pages are to be asked for. Waits for units that other threads
  // ask for, once it has done the rest.
  bool Ask(std::span<std::byte> bytes) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  enum class State : uint8_t { kNone, kBeingAsked, kGiven, kRefused };

  const std::span<std::byte> mapping_;
  absl::Mutex mutex_;
  std::vector<State> units_ ABSL_GUARDED_BY(mutex_);  // The whole ones.
};

}  // namespace crumb
