// SPDX-License-Identifier: Apache-2.0
//
// The thread that checks pulled bytes while they are still in the cache, beside the thread that
// receives them: receiving alone keeps a core busy. Thread-safe.
#pragma once

#include <deque>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#include "client/transport/ucx_pull.h"

namespace crumb {

class PullVerifier {
 public:
  PullVerifier();
  // Ends after the check that is under way; pulls that wait are dropped.
  ~PullVerifier();
  PullVerifier(const PullVerifier&) = delete;
  PullVerifier& operator=(const PullVerifier&) = delete;

  // Has pull->Verify() called soon. Once is enough for all calls that come before it starts, so the
  // queue is never longer than the number of pulls.
  void Add(std::shared_ptr<UcxPull> pull);  // shared: see UcxPull::Create.

 private:
  void Run();
  bool HasWork() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return is_ending_ || !waiting_.empty();
  }

  absl::Mutex mutex_;
  std::deque<std::shared_ptr<UcxPull>> waiting_ ABSL_GUARDED_BY(mutex_);
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace crumb
