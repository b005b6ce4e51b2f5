// SPDX-License-Identifier: Apache-2.0
//
// Memory that UCX fills with the pages of unfinished publishes, one piece for each, until they end.
// A commit that was refused finds them there again. Private to the daemon: unlike a staging memfd,
// no engine can change what has landed.
//
// Memory of ended publishes is kept for the same session's next, within a bound and for a while,
// since touching new memory costs as much as the transfer: so the daemon holds up to max_kept_bytes
// after a publish over UCX that it does not hold after one by map. Never for another session: what
// was not overwritten could be read there.
//
// Thread-safe.
#pragma once

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
  class Memory;

 public:
  struct Options {
    size_t max_bytes = size_t{4} << 30;  // Of all publishes together.
    uint32_t max_publishes = 256;
    // Of all ended publishes together, for at most max_kept_idle after the last of them.
    size_t max_kept_bytes = size_t{64} << 20;
    absl::Duration max_kept_idle = absl::Seconds(30);
    // Publishes that are neither added to nor committed for this long are dropped.
    absl::Duration max_idle = absl::Minutes(2);
  };

  // The staging of one publish. Alive as long as a transfer into it, whoever dropped it meanwhile.
  class Region {
   public:
    ~Region();
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;

   private:
    friend class StageArea;
    Region(std::shared_ptr<Memory> of_area, SessionId session, AnonymousMemory memory);
    bool is_complete() const { return request_landed_ == request_bytes_; }

    const std::shared_ptr<Memory> of_area_;  // shared: regions may outlive the area.
    const SessionId session_;
    AnonymousMemory memory_;  // Address space for the largest publish; pages come as they land.
    // Guarded by the area's mutex. Of the last request, which has a part reserved, of which a part
    // has landed.
    size_t request_begin_ = 0;
    size_t request_bytes_ = 0;
    size_t request_reserved_ = 0;
    size_t request_landed_ = 0;
    size_t announced_end_ = 0;  // Of all requests that have begun.
    size_t complete_end_ = 0;   // Of all whose bytes have landed.
    absl::Time begun_at_;       // When it began.
    absl::Time touched_at_;
  };
  struct Place {
    std::shared_ptr<Region> region;  // shared: with the transfer that fills it.
    std::span<std::byte> bytes;
  };

  StageArea(const Options& options, const Clock& clock);

  // Where `bytes` bytes of a message are to land; makes the region for the first. A request may be
  // for what an earlier one filled, once that was answered: what is still read then is the engine's
  // own mistake, which the checksums show. INVALID_ARGUMENT: not the next bytes of this request, or
  // beyond its end. RESOURCE_EXHAUSTED: no room, with the numbers.
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

  // The publish's bytes, for a write or the commit: those of the requests that are complete. Valid
  // as long as they are held, even if dropped meanwhile. FAILED_PRECONDITION: none is.
  absl::StatusOr<std::shared_ptr<const StagingMemory>> Find(SessionId session, PublishId publish);

  size_t used_bytes() const;  // Of publishes that have not ended.
  size_t kept_bytes() const;

 private:
  using Key = std::pair<SessionId, PublishId>;

  template <typename Predicate>
  void DropIf(Predicate is_dropped) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<std::shared_ptr<Region>> RegionFor(const Key& key, const StageMessage& message)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  const Clock& clock_;
  const std::shared_ptr<Memory> memory_;
  absl::Mutex mutex_;
  std::map<Key, std::shared_ptr<Region>> regions_ ABSL_GUARDED_BY(mutex_);
  absl::Time ended_at_ ABSL_GUARDED_BY(mutex_);  // When a publish was dropped last.
};

}  // namespace crumb
