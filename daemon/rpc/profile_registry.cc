// SPDX-License-Identifier: Apache-2.0
#include "daemon/rpc/profile_registry.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "proto/base/status_macros.h"

// shared: the header says by whom.

namespace crumb {

absl::StatusOr<std::shared_ptr<const Profile>> ProfileRegistry::Find(const ProfileId& id) {
  absl::MutexLock lock(&mutex_);
  const auto entry = entries_.find(id);
  if (entry == entries_.end()) {
    return absl::NotFoundError(
        absl::StrCat("profile ", id.Short(), " is not known here: attach again with profile_file"));
  }
  entry->second.last_use = ++uses_;
  return entry->second.profile;
}

absl::StatusOr<std::shared_ptr<const Profile>> ProfileRegistry::Add(const ProfileId& id,
                                                                    std::string_view file) {
  const auto* bytes = reinterpret_cast<const std::byte*>(file.data());
  CRUMB_ASSIGN_OR_RETURN(std::shared_ptr<const Profile> profile,
                         Profile::Parse(std::vector<std::byte>(bytes, bytes + file.size())));
  if (profile->id() != id) {
    return absl::InvalidArgumentError(
        absl::StrCat("profile_file has the SHA-256 ", profile->id().Short(),
                     ", but profile_id says ", id.Short(), ": send the file whose hash is the id"));
  }
  absl::MutexLock lock(&mutex_);
  if (const auto entry = entries_.find(id); entry != entries_.end()) {
    entry->second.last_use = ++uses_;
    return entry->second.profile;
  }
  if (!MakeRoomLocked(file.size())) {
    return absl::ResourceExhaustedError(absl::StrCat(
        entries_.size(), " profiles of ", bytes_, " bytes are in use, at most ", kMaxProfiles,
        " and ", kMaxBytes, " bytes are kept: detach engines of models no longer served"));
  }
  bytes_ += file.size();
  entries_[id] = {profile, ++uses_};
  return profile;
}

size_t ProfileRegistry::size() const {
  absl::MutexLock lock(&mutex_);
  return entries_.size();
}

bool ProfileRegistry::MakeRoomLocked(size_t bytes) {
  while (entries_.size() >= kMaxProfiles || bytes_ + bytes > kMaxBytes) {
    auto oldest = entries_.end();
    for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
      // Only Find and Add hand out further owners, and they need the mutex.
      const bool is_unused = entry->second.profile.use_count() == 1;
      if (is_unused &&
          (oldest == entries_.end() || entry->second.last_use < oldest->second.last_use)) {
        oldest = entry;
      }
    }
    if (oldest == entries_.end()) {
      return false;
    }
    bytes_ -= oldest->second.profile->file().size();
    entries_.erase(oldest);
  }
  return true;
}

}  // namespace crumb
