// SPDX-License-Identifier: Apache-2.0
//
// The parts of one publish that the daemon is writing, while the next one is staged. Each has a
// slot of the staging memory, which is free again once the daemon has answered. A part that finds
// the daemon's queue full is handed over again, later; any other error ends it all.
#pragma once

#include <cstddef>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "client/session/control_plane.h"
#include "proto/base/clock.h"

namespace crumb {

// Of a call to the daemon: it ended here, and the daemon may not have noticed.
bool MeansNoAnswer(const absl::Status& status);

// Confined to the publishing thread.
class PartWrites {
 public:
  struct Options {
    size_t num_slots = 16;
    // A part that is refused is repeated, until the deadline, after this long at first and twice as
    // long each time, up to max_backoff.
    absl::Duration first_backoff = absl::Milliseconds(10);
    absl::Duration max_backoff = absl::Milliseconds(250);
  };

  // `control` and `clock` outlive this. All calls are given the same deadline.
  PartWrites(const Options& options,
             ControlPlane& control,
             const Clock& clock,
             absl::Time deadline);
  // Waits for the answers that are still due.
  ~PartWrites();
  PartWrites(const PartWrites&) = delete;
  PartWrites& operator=(const PartWrites&) = delete;

  // Blocks until a slot is free, and takes it. An error that a part ended with.
  absl::StatusOr<size_t> AwaitSlot();
  void Start(size_t slot, CommitParams part);
  // Blocks until all parts are written. The first error.
  absl::Status AwaitAll();
  // Blocks until no answer is due any more. Whether one has not come, so that the daemon may still
  // be reading a slot.
  bool AwaitAnswers();

 private:
  enum class State { kFree, kTaken, kWriting, kRefused };
  struct Slot {
    State state = State::kFree;
    CommitParams part;
    absl::Duration backoff;
    absl::Time retry_at;  // While refused.
  };

  void Send(size_t slot) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnAnswer(size_t slot, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Until `is_done` or an error; hands over refused parts meanwhile.
  absl::Status AwaitProgress(bool (PartWrites::*is_done)() const) ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<size_t> TakeDueLocked(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Time NextRetryLocked() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  bool HasFreeLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsIdleLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  ControlPlane& control_;
  const Clock& clock_;
  const absl::Time deadline_;
  mutable absl::Mutex mutex_;
  std::vector<Slot> slots_ ABSL_GUARDED_BY(mutex_);
  size_t num_writing_ ABSL_GUARDED_BY(mutex_) = 0;
  bool lacks_answer_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status error_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb
