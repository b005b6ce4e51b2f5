// SPDX-License-Identifier: Apache-2.0
#include "daemon/transfer/stage_area.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "proto/base/huge_page.h"
#include "proto/base/status_macros.h"

namespace crumb {

// How much of it is in use, and what is kept of regions that have ended. Thread-safe.
class StageArea::Memory {
 public:
  explicit Memory(size_t max_kept_bytes) : max_kept_bytes_(max_kept_bytes) {}

  // RESOURCE_EXHAUSTED: no address space.
  absl::StatusOr<AnonymousMemory> Take() {
    {
      const absl::MutexLock lock(&mutex_);
      if (!kept_.empty()) {
        Kept kept = std::move(kept_.back());
        kept_.pop_back();
        kept_bytes_ -= kept.touched_bytes;
        return std::move(kept.memory);
      }
    }
    return AnonymousMemory::Map(kMaxStagingBytes);
  }
  // Of which the first `used_bytes` were in use. What is beyond the bound goes back to the system.
  void GiveBack(AnonymousMemory memory, size_t used_bytes) {
    used_bytes_ -= used_bytes;
    size_t keep;
    {
      const absl::MutexLock lock(&mutex_);
      const size_t pages = (used_bytes + kHugePageBytes - 1) / kHugePageBytes;
      keep = std::min(pages, (max_kept_bytes_ - kept_bytes_) / kHugePageBytes) * kHugePageBytes;
      kept_bytes_ += keep;
    }
    // Without the lock, for it takes milliseconds.
    if (keep == 0 || !memory.Forget(keep)) {
      const absl::MutexLock lock(&mutex_);
      kept_bytes_ -= keep;
      return;
    }
    const absl::MutexLock lock(&mutex_);
    kept_.push_back({std::move(memory), keep});
  }
  void DropKept() {
    std::vector<Kept> dropped;  // Unmapped after the lock.
    const absl::MutexLock lock(&mutex_);
    dropped.swap(kept_);
    for (const Kept& kept : dropped) {
      kept_bytes_ -= kept.touched_bytes;
    }
  }
  size_t kept_bytes() const {
    const absl::MutexLock lock(&mutex_);
    return kept_bytes_;
  }
  std::atomic<size_t>& used_bytes() { return used_bytes_; }

 private:
  struct Kept {
    AnonymousMemory memory;
    size_t touched_bytes;
  };

  const size_t max_kept_bytes_;
  std::atomic<size_t> used_bytes_{0};
  mutable absl::Mutex mutex_;
  std::vector<Kept> kept_ ABSL_GUARDED_BY(mutex_);
  size_t kept_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // At least the sum of kept_, within the bound.
};

// shared: see Region.
StageArea::Region::Region(std::shared_ptr<Memory> of_area, AnonymousMemory memory)
    : of_area_(std::move(of_area)), memory_(std::move(memory)) {}

StageArea::Region::~Region() {
  of_area_->GiveBack(std::move(memory_), announced_bytes_);
}

// shared: see Region.
StageArea::StageArea(const Options& options, const Clock& clock)
    : options_(options),
      clock_(clock),
      memory_(std::make_shared<Memory>(options.max_kept_bytes)),
      ended_at_(clock.Now()) {}

size_t StageArea::used_bytes() const {
  return memory_->used_bytes();
}

size_t StageArea::kept_bytes() const {
  return memory_->kept_bytes();
}

absl::StatusOr<std::shared_ptr<StageArea::Region>> StageArea::RegionFor(
    const Key& key, const StageMessage& message) {
  if (const auto found = regions_.find(key); found != regions_.end()) {
    return found->second;
  }
  if (message.offset != 0) {
    return absl::InvalidArgumentError(absl::StrCat("publish ", message.publish_id, ": bytes at ",
                                                   message.offset,
                                                   " came, but its first ones have not"));
  }
  if (regions_.size() >= options_.max_publishes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("publish over UCX: ", regions_.size(),
                     " publishes are being staged, the limit; retry, or go on without"));
  }
  CRUMB_ASSIGN_OR_RETURN(AnonymousMemory memory, memory_->Take());
  // shared: see Place.
  std::shared_ptr<Region> region(new Region(memory_, std::move(memory)));
  return regions_.emplace(key, std::move(region)).first->second;
}

absl::StatusOr<StageArea::Place> StageArea::Reserve(SessionId session,
                                                    const StageMessage& message,
                                                    size_t bytes) {
  const absl::MutexLock lock(&mutex_);
  CRUMB_ASSIGN_OR_RETURN(const std::shared_ptr<Region> region,
                         RegionFor({session, PublishId(message.publish_id)}, message));
  const bool begins = message.request_offset == 0;
  const uint64_t request_end = message.offset - message.request_offset + message.request_bytes;
  // The decoder has held the request within the bounds of staging memory.
  if (message.offset != region->reserved_bytes_ || bytes == 0 ||
      bytes > message.request_bytes - message.request_offset ||
      (begins ? region->landed_bytes_ != region->announced_bytes_
              : request_end != region->announced_bytes_)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "publish ", message.publish_id, ": ", bytes, " bytes at ", message.offset,
        " of a request that ends at ", request_end, " came; expected the next bytes at ",
        region->reserved_bytes_, " of one that ends at ", region->announced_bytes_,
        ", or a new one once that has been answered"));
  }
  if (begins) {
    const size_t used_bytes = memory_->used_bytes();
    if (used_bytes + message.request_bytes > options_.max_bytes) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "publish of ", message.request_bytes, " bytes over UCX: ", used_bytes, " of ",
          options_.max_bytes, " bytes of staging are in use; retry, or go on without"));
    }
    memory_->used_bytes() += message.request_bytes;
    region->announced_bytes_ += message.request_bytes;
    region->request_bytes_ = message.request_bytes;
    region->begun_at_ = clock_.Now();
  }
  region->reserved_bytes_ += bytes;
  region->touched_at_ = clock_.Now();
  return Place{region, region->memory_.bytes().subspan(message.offset, bytes)};
}

std::optional<StageArea::Landing> StageArea::Landed(const Place& place) {
  const absl::Time now = clock_.Now();
  const absl::MutexLock lock(&mutex_);
  Region& region = *place.region;
  region.landed_bytes_ += place.bytes.size();
  region.touched_at_ = now;
  if (region.landed_bytes_ != region.announced_bytes_) {
    return std::nullopt;
  }
  return Landing{region.request_bytes_, now - region.begun_at_};
}

void StageArea::Drop(SessionId session, PublishId publish) {
  DropIf([&](const Key& key, const Region&) { return key == Key{session, publish}; });
}

void StageArea::DropSession(SessionId session) {
  DropIf([&](const Key& key, const Region&) { return key.first == session; });
}

void StageArea::Tick(absl::Time now) {
  DropIf([&](const Key&, const Region& region) {
    return now > region.touched_at_ + options_.max_idle;
  });
  const bool is_idle = [&] {
    const absl::MutexLock lock(&mutex_);
    return regions_.empty() && now > ended_at_ + options_.max_kept_idle;
  }();
  if (is_idle) {
    memory_->DropKept();
  }
}

template <typename Predicate>
void StageArea::DropIf(Predicate is_dropped) {
  std::vector<std::shared_ptr<Region>> dropped;  // Given back after the lock.
  const absl::Time now = clock_.Now();
  const absl::MutexLock lock(&mutex_);
  for (auto region = regions_.begin(); region != regions_.end();) {
    if (is_dropped(region->first, *region->second)) {
      ended_at_ = now;
      dropped.push_back(std::move(region->second));
      region = regions_.erase(region);
    } else {
      ++region;
    }
  }
}

absl::StatusOr<std::shared_ptr<const StagingMemory>> StageArea::Find(SessionId session,
                                                                     PublishId publish) {
  const absl::Time now = clock_.Now();
  const absl::MutexLock lock(&mutex_);
  const auto found = regions_.find({session, publish});
  if (found == regions_.end()) {
    return absl::FailedPreconditionError(
        absl::StrCat("publish ", publish.value(),
                     ": nothing is here that came over UCX: it was committed, aborted or "
                     "left alone for ",
                     absl::FormatDuration(options_.max_idle),
                     ", or nothing was sent; send its pages before the commit"));
  }
  const std::shared_ptr<Region> region = found->second;
  const std::span<const std::byte> bytes = region->memory_.bytes().first(region->landed_bytes_);
  if (region->landed_bytes_ != region->announced_bytes_) {
    return absl::FailedPreconditionError(absl::StrCat(
        "publish ", publish.value(), ": ", region->landed_bytes_, " of ", region->announced_bytes_,
        " bytes have come over UCX; wait for the daemon's answer"));
  }
  region->touched_at_ = now;
  // The region lives until the memory is released.
  return std::make_shared<const StagingMemory>(bytes, [region] {});
}

}  // namespace crumb
