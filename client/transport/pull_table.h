// SPDX-License-Identifier: Apache-2.0
//
// The pulls of a group of links that wait for bytes, by the numbers of their requests: the daemon
// sends a pull's bytes over whichever of the links is free. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "client/transport/ucx_pull.h"

namespace crumb {

class PullTable {
 public:
  PullTable();
  ~PullTable() = default;
  PullTable(const PullTable&) = delete;
  PullTable& operator=(const PullTable&) = delete;

  // HelloMessage::group of those links.
  uint64_t group() const { return group_; }
  // For a request of any kind: no two of the group have the same.
  uint64_t NewRequestId() { return next_request_++; }

  // shared: see UcxPull::Create.
  void Add(uint64_t request_id, std::shared_ptr<UcxPull> pull);
  // Null: its bytes are no longer wanted.
  std::shared_ptr<UcxPull> Find(uint64_t request_id) const;
  // If it is there.
  void Remove(uint64_t request_id);
  // Fails all pulls, and removes them.
  void FailAll(const absl::Status& status);
  // Fails those whose deadline has passed; removes all that have failed, and returns their numbers.
  std::vector<uint64_t> RemoveFailed(absl::Time now);

 private:
  const uint64_t group_;
  std::atomic<uint64_t> next_request_{1};
  mutable absl::Mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<UcxPull>> pulls_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb
