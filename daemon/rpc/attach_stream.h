// SPDX-License-Identifier: Apache-2.0
//
// One Attach stream: a session. Reads the one AttachRequest, answers it, and from then on only
// waits for the stream to end, in whatever way; that ends the session at once.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "grpcpp/support/server_callback.h"

#include "daemon/rpc/rpc_context.h"
#include "daemon/rpc/session_registry.h"
#include "proto/crumb/v1/cache.pb.h"

namespace crumb {

class AttachStream;

// The streams that are open, to tell them that the daemon is draining. Thread-safe.
class AttachStreams {
 public:
  // Sends each session an AttachReply with `draining`; those that attach later get it at once.
  void SetDraining();
  // Ends each session, and its stream, as when the daemon has gone.
  void EndAll();
  bool draining() const { return draining_.load(); }

 private:
  friend class AttachStream;
  // All that are open, each under a hold.
  std::vector<AttachStream*> HoldAll() ABSL_LOCKS_EXCLUDED(mutex_);
  void Add(AttachStream* stream);
  void Remove(AttachStream* stream);

  std::atomic<bool> draining_{false};
  // Taken before a stream's own mutex; no stream is destroyed while it is held.
  absl::Mutex mutex_;
  absl::flat_hash_set<AttachStream*> streams_ ABSL_GUARDED_BY(mutex_);
};

// Owned by gRPC's call: deletes itself in OnDone. Thread-safe, as reactions may overlap.
//
// gRPC may run reactions inside of its Start and Finish functions, and deletes this after Finish.
// So those are called without the mutex, and Finish only when no hold and no write is left.
class AttachStream : public grpc::ServerBidiReactor<v1::AttachRequest, v1::AttachReply> {
 public:
  AttachStream(RpcContext& context, AttachStreams& streams);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  friend class AttachStreams;

  // Under a hold, which AttachWith gives up. Looks the profile up, or has the pool parse the file
  // that came along.
  void Attach();
  void AttachWith(const AttachSpec& spec, absl::StatusOr<std::shared_ptr<const Profile>> profile);
  v1::AttachReply MakeReply(const AttachedEngine& session) const;

  // Keeps the stream from finishing. False: it has.
  bool Hold() ABSL_LOCKS_EXCLUDED(mutex_);
  // Gives up a hold; this may be deleted on return.
  void Release() ABSL_LOCKS_EXCLUDED(mutex_);
  // Under a hold. Has a reply with `draining` sent.
  void NotifyDraining() ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends the session at once, and the stream as soon as nothing holds it. This may be deleted on
  // return, unless the caller has a hold.
  void End(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Starts what is due. This may be deleted on return, unless the caller has a hold.
  void WriteOrFinish() ABSL_LOCKS_EXCLUDED(mutex_);

  RpcContext& context_;
  AttachStreams& streams_;
  const absl::Time start_;
  v1::AttachRequest request_;  // Confined to the read under way, then to Attach.
  v1::AttachReply sent_;       // Confined to the write under way.

  absl::Mutex mutex_;
  std::shared_ptr<const AttachedEngine> session_ ABSL_GUARDED_BY(mutex_);  // shared: registry.
  std::unique_ptr<v1::AttachReply> to_send_ ABSL_GUARDED_BY(mutex_);
  int holds_ ABSL_GUARDED_BY(mutex_) = 0;
  bool opened_ ABSL_GUARDED_BY(mutex_) = false;  // The first read is done.
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb
