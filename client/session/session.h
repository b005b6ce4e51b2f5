// SPDX-License-Identifier: Apache-2.0
//
// One attached session: its data planes, the leases that this process holds in it, and whether it
// still lives. State only: threads of the client renew and release what is listed here.
//
// A lease is believed for the time that the daemon named, counted on this process's own clock from
// the moment the request was *sent*: so it ends here before it ends there, also when this process
// was stopped meanwhile.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "client/session/control_plane.h"
#include "client/transport/map_transport.h"
#include "client/transport/page_source.h"
#include "crumb/client.h"
#include "proto/base/clock.h"
#include "proto/base/ids.h"

namespace crumb {

// The data planes of one session; at least one of them in use.
struct DataPlanes {
  DataPlane in_use = DataPlane::kAuto;
  std::unique_ptr<MapTransport> map;   // Null: not in use.
  std::unique_ptr<PageTransport> ucx;  // Null: not in use.
  std::string note;                    // Why it is not a better one; empty: it is the best.

  PageTransport* transport() const { return map != nullptr ? map.get() : ucx.get(); }
};

// Thread-safe.
class Session {
 public:
  // shared: by the client and by every prefix handle that has a lease in it; so a handle may be
  // used and destroyed after its session, and its client, are gone.
  Session(std::shared_ptr<ControlPlane> control,
          AttachedSession attached,
          DataPlanes planes,
          const Clock& clock);

  const SessionInfo& info() const { return attached_.info; }
  absl::Duration lease_time() const { return attached_.lease; }
  ControlPlane& control() const { return *control_; }
  const DataPlanes& planes() const { return planes_; }

  // OK while it lives; otherwise FAILED_PRECONDITION with what ended it, naming the epoch it was of
  // and that of the session after it, once there is one.
  absl::Status status() const;
  // The first reason counts.
  void End(const absl::Status& reason);
  void SetNextEpoch(uint64_t epoch) { next_epoch_.store(epoch, std::memory_order_relaxed); }

  // `until` is when the request was sent, plus the lease time of the reply.
  void AddLease(LeaseId lease, absl::Time until);
  // FAILED_PRECONDITION, naming the lease, once it is over, or with the session.
  absl::Status CheckLease(LeaseId lease) const;
  // Gives it up; the daemon is told in the background.
  void ReleaseLease(LeaseId lease);

  // For the thread that keeps leases.

  struct Work {
    std::vector<LeaseId> release;  // To be told to the daemon; taken off the list.
    std::vector<LeaseId> renew;    // All that are held and not over.
  };
  // Blocks until leases were released, `wake` (the time of the next renewal) or the session's end.
  Work WaitForWork(absl::Time wake);
  // After a renewal that was sent at `sent_at`.
  void Renewed(const std::vector<LeaseId>& renewed, const RenewedLeases& reply, absl::Time sent_at);

 private:
  std::string Name() const;

  const std::shared_ptr<ControlPlane> control_;  // shared: calls may be under way at the end.
  const AttachedSession attached_;
  const DataPlanes planes_;
  const Clock& clock_;

  std::atomic<uint64_t> next_epoch_{0};  // Relaxed: only words.

  mutable absl::Mutex mutex_;
  absl::Status end_reason_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<LeaseId, absl::Time> leases_ ABSL_GUARDED_BY(mutex_);  // Until when.
  std::vector<LeaseId> released_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb
