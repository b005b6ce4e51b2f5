// SPDX-License-Identifier: Apache-2.0
//
// Memory that UCX fills with the pages of unfinished publishes, one piece for each, until they end.
// A commit that was refused finds them there again. Private to the daemon: unlike a staging memfd,
// no engine can change what has landed.
//
// Thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "client/transport/transfer_memory.h"
#include "daemon/transfer/staging_memory.h"
#include "proto/base/clock.h"
#include "proto/base/ids.h"
#include "proto/wire/pull_message.h"

namespace crumb {

class StageArea {
 public:
  struct Options {
    size_t max_bytes = size_t{4} << 30;  // Of all publishes together.
    uint32_t max_publishes = 256;
    // Publishes that are neither added to nor committed for this long are dropped.
    absl::Duration max_idle = absl::Minutes(2);
  };

  // The staging of one publish. Alive as long as a transfer into it, whoever dropped it meanwhile.
  class Region {
   public:
    Region() = default;
    ~Region();
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;

   private:
    friend class StageArea;
    AnonymousMemory memory_;  // Address space for the largest publish; pages come as they land.
    std::shared_ptr<std::atomic<size_t>> used_bytes_;  // shared: regions may outlive the area.
    // Guarded by the area's mutex. landed <= reserved <= announced.
    size_t announced_bytes_ = 0;  // By the requests that have begun.
    size_t reserved_bytes_ = 0;   // Have a place.
    size_t landed_bytes_ = 0;
    size_t request_bytes_ = 0;  // Of the last request.
    absl::Time begun_at_;       // When it began.
    absl::Time touched_at_;
  };
  struct Place {
    std::shared_ptr<Region> region;  // shared: with the transfer that fills it.
    std::span<std::byte> bytes;
  };

  StageArea(const Options& options, const Clock& clock);

  // Where `bytes` bytes of a message are to land; makes the region for offset 0. INVALID_ARGUMENT:
  // not the next bytes of this publish, or beyond the request's end. RESOURCE_EXHAUSTED: no room,
  // with the numbers.
  absl::StatusOr<Place> Reserve(SessionId session, const StageMessage& message, size_t bytes);
  // A request whose bytes are all in place.
  struct Landing {
    size_t bytes = 0;
    absl::Duration duration;
  };
  // `place` has been filled; perhaps that was the last of its request.
  std::optional<Landing> Landed(const Place& place);
  void Drop(SessionId session, PublishId publish);
  void DropSession(SessionId session);
  // Drops what has been idle for too long.
  void Tick(absl::Time now);

  // The publish's bytes, for a commit; valid as long as they are held, even if dropped meanwhile.
  // FAILED_PRECONDITION: not all have come, or none.
  absl::StatusOr<std::shared_ptr<const StagingMemory>> Find(SessionId session, PublishId publish);

  size_t used_bytes() const { return *used_bytes_; }

 private:
  using Key = std::pair<SessionId, PublishId>;

  absl::StatusOr<std::shared_ptr<Region>> RegionFor(const Key& key, const StageMessage& message)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  const Clock& clock_;
  const std::shared_ptr<std::atomic<size_t>> used_bytes_;
  absl::Mutex mutex_;
  std::map<Key, std::shared_ptr<Region>> regions_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb
