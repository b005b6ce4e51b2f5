// SPDX-License-Identifier: Apache-2.0
//
// Keeps one session attached, whatever happens to the daemon, and its leases renewed.
//
// Threads of its own: one attaches and then waits for the session's end, and attaches anew with
// back-off; one renews and releases leases.
#pragma once

#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "client/session/control_plane.h"
#include "client/session/session.h"
#include "crumb/client.h"
#include "proto/base/clock.h"

namespace crumb {

// Thread-safe.
class SessionKeeper {
 public:
  // `options` are checked, and heads.count is not 0. `gpu_uuid` is that of options.gpu, if any.
  SessionKeeper(ClientOptions options, const GpuUuid& gpu_uuid, const Clock& clock);
  // Ends the session.
  ~SessionKeeper();
  SessionKeeper(const SessionKeeper&) = delete;
  SessionKeeper& operator=(const SessionKeeper&) = delete;

  // As Client's.
  absl::Status WaitAttached(absl::Duration timeout);
  ClientState state() const;
  // UNAVAILABLE, with the reason, while not attached.
  absl::StatusOr<std::shared_ptr<Session>> Current() const;

 private:
  void AttachMain();
  // One session from its attempt to its end. Returns why it ended, or did not begin.
  absl::Status RunSession();
  absl::StatusOr<DataPlanes> OpenDataPlanes(const SessionInfo& info);
  // Why lookups find no pages in the memory of ClientOptions::gpu; empty where they do.
  std::string GpuNote(const Session& session) const;
  // Waits with back-off, or until this ends.
  void Pause(absl::Duration backoff);

  void LeaseMain();
  void KeepLeases(Session* session);

  const ClientOptions options_;
  const GpuUuid gpu_uuid_;
  const Clock& clock_;

  mutable absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  // shared: with calls under way, and prefixes.
  std::shared_ptr<Session> session_ ABSL_GUARDED_BY(mutex_);       // Null while not attached.
  std::shared_ptr<Session> last_session_ ABSL_GUARDED_BY(mutex_);  // To be told of its successor.
  std::shared_ptr<ControlPlane> control_ ABSL_GUARDED_BY(mutex_);  // To cancel it.
  ClientState state_ ABSL_GUARDED_BY(mutex_);

  std::thread attach_thread_;
  std::thread lease_thread_;
};

}  // namespace crumb
