// SPDX-License-Identifier: Apache-2.0
#include "daemon/transfer/stage_area.h"

#include <algorithm>
#include <atomic>
#include <iterator>
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
  absl::StatusOr<AnonymousMemory> Take(SessionId session) {
    {
      const absl::MutexLock lock(&mutex_);
      const auto found = std::find_if(kept_.begin(), kept_.end(), [session](const Kept& kept) {
        return kept.session == session;
      });
      if (found != kept_.end()) {
        Kept kept = std::move(*found);
        kept_.erase(found);
        kept_bytes_ -= kept.touched_bytes;
        return std::move(kept.memory);
      }
    }
    return AnonymousMemory::Map(kMaxStagingBytes);
  }
  // Of which the first `used_bytes` were in use. What is beyond the bound goes back to the system.
  void GiveBack(SessionId session, AnonymousMemory memory, size_t used_bytes) {
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
    kept_.push_back({session, std::move(memory), keep});
  }
  // Of one session, or of all.
  void DropKept(std::optional<SessionId> session = std::nullopt) {
    std::vector<Kept> dropped;  // Unmapped after the lock.
    const absl::MutexLock lock(&mutex_);
    const auto stays = [session](const Kept& kept) {
      return session.has_value() && kept.session != *session;
    };
    const auto first = std::partition(kept_.begin(), kept_.end(), stays);
    dropped.assign(std::make_move_iterator(first), std::make_move_iterator(kept_.end()));
    kept_.erase(first, kept_.end());
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
    SessionId session;
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
StageArea::Region::Region(std::shared_ptr<Memory> of_area,
                          SessionId session,
                          AnonymousMemory memory)
    : of_area_(std::move(of_area)), session_(session), memory_(std::move(memory)) {}

StageArea::Region::~Region() {
  of_area_->GiveBack(session_, std::move(memory_), announced_end_);
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
  if (message.request_offset != 0) {
    return absl::InvalidArgumentError(absl::StrCat("publish ", message.publish_id, ": bytes at ",
                                                   message.request_offset,
                                                   " of a request came, "
                                                   "but its first ones have not"));
  }
  if (regions_.size() >= options_.max_publishes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("publish over UCX: ", regions_.size(),
                     " publishes are being staged, the limit; retry, or go on without"));
  }
  CRUMB_ASSIGN_OR_RETURN(AnonymousMemory memory, memory_->Take(key.first));
  // shared: see Place.
  std::shared_ptr<Region> region(new Region(memory_, key.first, std::move(memory)));
  return regions_.emplace(key, std::move(region)).first->second;
}

absl::StatusOr<StageArea::Place> StageArea::Reserve(SessionId session,
                                                    const StageMessage& message,
                                                    size_t bytes) {
  const absl::MutexLock lock(&mutex_);
  CRUMB_ASSIGN_OR_RETURN(const std::shared_ptr<Region> region,
                         RegionFor({session, PublishId(message.publish_id)}, message));
  const bool begins = message.request_offset == 0;
  const uint64_t request_begin = message.offset - message.request_offset;
  const bool is_next = begins ? region->is_complete()
                              : request_begin == region->request_begin_ &&
                                    message.request_bytes == region->request_bytes_ &&
                                    message.request_offset == region->request_reserved_;
  // The decoder has held the request within the bounds of staging memory.
  if (!is_next || bytes == 0 || bytes > message.request_bytes - message.request_offset) {
    return absl::InvalidArgumentError(
        absl::StrCat("publish ", message.publish_id, ": ", bytes, " bytes at ",
                     message.request_offset, " of a request of ", message.request_bytes, " at ",
                     request_begin, " came; expected the next at ", region->request_reserved_,
                     " of one of ", region->request_bytes_, " at ", region->request_begin_,
                     ", or a new one once that has been answered"));
  }
  if (begins) {
    const size_t end =
        std::max<size_t>(region->announced_end_, request_begin + message.request_bytes);
    const size_t more_bytes = end - region->announced_end_;
    const size_t used_bytes = memory_->used_bytes();
    if (used_bytes + more_bytes > options_.max_bytes) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "publish of ", message.request_bytes, " bytes over UCX: ", used_bytes, " of ",
          options_.max_bytes, " bytes of staging are in use; retry, or go on without"));
    }
    memory_->used_bytes() += more_bytes;
    region->announced_end_ = end;
    region->request_begin_ = request_begin;
    region->request_bytes_ = message.request_bytes;
    region->request_reserved_ = 0;
    region->request_landed_ = 0;
    region->begun_at_ = clock_.Now();
  }
  region->request_reserved_ += bytes;
  region->touched_at_ = clock_.Now();
  return Place{region, region->memory_.bytes().subspan(message.offset, bytes)};
}

std::optional<StageArea::Landing> StageArea::Landed(const Place& place) {
  const absl::Time now = clock_.Now();
  const absl::MutexLock lock(&mutex_);
  Region& region = *place.region;
  region.request_landed_ += place.bytes.size();
  region.touched_at_ = now;
  if (!region.is_complete()) {
    return std::nullopt;
  }
  region.complete_end_ =
      std::max(region.complete_end_, region.request_begin_ + region.request_bytes_);
  return Landing{region.request_bytes_, now - region.begun_at_};
}

void StageArea::Drop(SessionId session, PublishId publish) {
  DropIf([&](const Key& key, const Region&) { return key == Key{session, publish}; });
}

void StageArea::DropSession(SessionId session) {
  DropIf([&](const Key& key, const Region&) { return key.first == session; });
  memory_->DropKept(session);
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
  const std::span<const std::byte> bytes = region->memory_.bytes().first(region->complete_end_);
  if (bytes.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "publish ", publish.value(), ": ", region->request_landed_, " of ", region->request_bytes_,
        " bytes have come over UCX; wait for the daemon's answer"));
  }
  region->touched_at_ = now;
  // The region lives until the memory is released.
  return std::make_shared<const StagingMemory>(bytes, [region] {});
}

}  // namespace crumb
