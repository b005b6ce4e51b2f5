// SPDX-License-Identifier: Apache-2.0
#include "daemon/transfer/stage_area.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "proto/base/status_macros.h"

namespace crumb {

StageArea::Region::~Region() {
  if (used_bytes_ != nullptr) {
    *used_bytes_ -= announced_bytes_;
  }
}

// shared: see Region.
StageArea::StageArea(const Options& options, const Clock& clock)
    : options_(options), clock_(clock), used_bytes_(std::make_shared<std::atomic<size_t>>(0)) {}

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
  auto region = std::make_shared<Region>();
  CRUMB_ASSIGN_OR_RETURN(region->memory_, AnonymousMemory::Map(kMaxStagingBytes));
  region->used_bytes_ = used_bytes_;
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
    if (*used_bytes_ + message.request_bytes > options_.max_bytes) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "publish of ", message.request_bytes, " bytes over UCX: ", used_bytes_->load(), " of ",
          options_.max_bytes, " bytes of staging are in use; retry, or go on without"));
    }
    *used_bytes_ += message.request_bytes;
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
  const absl::MutexLock lock(&mutex_);
  regions_.erase({session, publish});
}

void StageArea::DropSession(SessionId session) {
  const absl::MutexLock lock(&mutex_);
  regions_.erase(regions_.lower_bound({session, PublishId(0)}),
                 regions_.upper_bound({session, PublishId(UINT64_MAX)}));
}

void StageArea::Tick(absl::Time now) {
  const absl::MutexLock lock(&mutex_);
  for (auto region = regions_.begin(); region != regions_.end();) {
    region = now > region->second->touched_at_ + options_.max_idle ? regions_.erase(region)
                                                                   : std::next(region);
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
