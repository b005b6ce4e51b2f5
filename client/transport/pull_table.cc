// SPDX-License-Identifier: Apache-2.0
#include "client/transport/pull_table.h"

#include <random>
#include <utility>

#include "absl/strings/str_cat.h"

namespace crumb {
namespace {

uint64_t RandomNumber() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

}  // namespace

PullTable::PullTable() : group_(RandomNumber()) {}

// shared: see UcxPull::Create.
void PullTable::Add(uint64_t request_id, std::shared_ptr<UcxPull> pull) {
  const absl::MutexLock lock(&mutex_);
  pulls_[request_id] = std::move(pull);
}

std::shared_ptr<UcxPull> PullTable::Find(uint64_t request_id) const {
  const absl::MutexLock lock(&mutex_);
  const auto found = pulls_.find(request_id);
  return found == pulls_.end() ? nullptr : found->second;
}

void PullTable::Remove(uint64_t request_id) {
  std::shared_ptr<UcxPull> removed;  // shared: ends after the lock, if it is the last.
  const absl::MutexLock lock(&mutex_);
  if (const auto found = pulls_.find(request_id); found != pulls_.end()) {
    removed = std::move(found->second);
    pulls_.erase(found);
  }
}

void PullTable::FailAll(const absl::Status& status) {
  std::unordered_map<uint64_t, std::shared_ptr<UcxPull>> failed;
  {
    const absl::MutexLock lock(&mutex_);
    failed.swap(pulls_);
  }
  for (const auto& [id, pull] : failed) {
    pull->Fail(status);
  }
}

std::vector<uint64_t> PullTable::RemoveFailed(absl::Time now) {
  std::vector<uint64_t> ended;
  std::vector<std::shared_ptr<UcxPull>> removed;  // shared: as in Remove.
  const absl::MutexLock lock(&mutex_);
  for (auto at = pulls_.begin(); at != pulls_.end();) {
    UcxPull& pull = *at->second;
    if (now > pull.deadline()) {
      pull.Fail(absl::DeadlineExceededError(absl::StrCat("pull over UCX: ", pull.landed_bytes(),
                                                         " of ", pull.total_bytes(),
                                                         " bytes came by its deadline")));
    }
    if (pull.IsOpen()) {
      ++at;
    } else {
      ended.push_back(at->first);
      removed.push_back(std::move(at->second));
      at = pulls_.erase(at);
    }
  }
  return ended;
}

}  // namespace crumb
