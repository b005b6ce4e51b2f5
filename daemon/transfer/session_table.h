// SPDX-License-Identifier: Apache-2.0
//
// Who may speak for which session, on every socket of the daemon, and the staging memory that each
// session has given. Sessions are made and ended by the control plane. Their ids are no secret; the
// sockets have no other way to tell one client from another than the session's secret.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

#include "daemon/transfer/staging_memory.h"
#include "proto/base/ids.h"
#include "proto/wire/memory_socket.h"

namespace crumb {

using SessionSecret = std::array<uint8_t, kSessionSecretBytes>;

// From the system's generator of random numbers (getrandom); waits only in the first moments after
// the machine's boot.
SessionSecret MakeSessionSecret();

// Thread-safe. Bounded by the store's limit of sessions: entries come and go with its sessions.
class SessionTable {
 public:
  void Add(SessionId session, const SessionSecret& secret);
  // Also gives up its staging memory, once no commit reads it. No-op for one that is not there.
  void Remove(SessionId session);

  // FAILED_PRECONDITION: no such session, or it ended. UNAUTHENTICATED: another secret, which is
  // counted. Takes the same time whichever byte differs.
  absl::Status Authenticate(SessionId session, const SessionSecret& secret) const;

  // How often Authenticate was given another secret.
  uint64_t wrong_secrets() const { return wrong_secrets_.load(std::memory_order_relaxed); }

  // In place of an earlier one. FAILED_PRECONDITION: no such session.
  absl::Status SetStaging(SessionId session, std::shared_ptr<const StagingMemory> staging);
  // FAILED_PRECONDITION: no such session, or it has given none.
  absl::StatusOr<std::shared_ptr<const StagingMemory>> Staging(SessionId session) const;

 private:
  struct Entry {
    SessionSecret secret{};
    std::shared_ptr<const StagingMemory> staging;  // shared: see StagingMemory::MapMemfd.
  };

  mutable std::atomic<uint64_t> wrong_secrets_{0};  // Relaxed: only a figure.
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<SessionId, Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb
