// SPDX-License-Identifier: Apache-2.0
//
// The model profiles that engines have brought, by id. Bounded; those that no session uses make
// room for others, the one used longest ago first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

#include "crumb/cuda/profile.h"
#include "proto/base/ids.h"

namespace crumb {

// Thread-safe.
class ProfileRegistry {
 public:
  static constexpr size_t kMaxProfiles = 64;
  static constexpr size_t kMaxBytes = size_t{2} << 30;  // Of files, together.

  // shared: with sessions and the publishes they began.
  //
  // NOT_FOUND: not known; the engine is to send the file.
  absl::StatusOr<std::shared_ptr<const Profile>> Find(const ProfileId& id);
  // Parses and keeps a profile file. Blocking: up to a second for a large one. INVALID_ARGUMENT:
  // malformed, or of another id than `id`. RESOURCE_EXHAUSTED: too many profiles in use.
  absl::StatusOr<std::shared_ptr<const Profile>> Add(const ProfileId& id, std::string_view file);

  size_t size() const;

 private:
  struct Entry {
    std::shared_ptr<const Profile> profile;
    uint64_t last_use = 0;
  };

  // Forgets unused profiles until one more of `bytes` has room. Returns whether it has.
  bool MakeRoomLocked(size_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;
  absl::flat_hash_map<ProfileId, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  size_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t uses_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace crumb
