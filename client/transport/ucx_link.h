// SPDX-License-Identifier: Apache-2.0
//
// One connection of a session to its daemon's UCX port: keeps the worker, says hello, sends
// requests and hands what comes back to the session's pulls, whichever link asked for it. When the
// daemon is lost, all that was under way fails with UNAVAILABLE, and the next request connects
// anew.
//
// Thread-safe but for the Handler's functions, which are Confined to the worker's thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "client/transport/page_source.h"
#include "client/transport/pull_table.h"
#include "client/transport/transfer_memory.h"
#include "client/transport/ucx_pull.h"
#include "client/transport/ucx_transport.h"
#include "client/transport/ucx_worker.h"

namespace crumb {

// NOLINTNEXTLINE(cppcoreguidelines-virtual-class-destructor): final, held as itself.
class UcxLink final : public UcxWorker::Handler {
 public:
  // Connects and waits for the daemon's answer to the hello. Errors as ConnectUcx.
  // shared: by the transport and by the sources that it opened, which may outlive it.
  static absl::StatusOr<std::shared_ptr<UcxLink>> Connect(const UcxTransportOptions& options,
                                                          const SessionInfo& session,
                                                          std::shared_ptr<PullTable> pulls,
                                                          absl::Time deadline,
                                                          const Clock& clock);

  // Connects anew, if the daemon was lost since.
  void Reconnect();
  // Asks for the bytes of a pull, which is in the table by then.
  absl::Status StartPull(uint64_t request_id, std::shared_ptr<UcxPull> pull);
  // Tells the daemon that the pull's bytes are not wanted any more.
  void CancelPull(uint64_t request_id);
  absl::Status SendPages(PublishId publish,
                         uint64_t offset,
                         std::span<const OutgoingPage> pages,
                         absl::Time deadline);

  const SessionInfo& session() const { return session_; }
  const Clock& clock() const { return clock_; }

  bool OnPeer(UcxPeerId peer) override;
  void OnMessage(UcxPeerId peer, UcxMessage& message) override;
  void OnLost(UcxPeerId peer, const absl::Status& reason) override;
  void OnTick(absl::Time now) override;

 private:
  // The answer to a request, which one thread waits for and the worker's thread sets.
  class Answer {
   public:
    void Set(const absl::Status& status);
    bool IsSet() const;
    // DEADLINE_EXCEEDED, naming `what`, when none has come by then.
    absl::Status Wait(absl::Duration timeout, absl::string_view what) const;

   private:
    bool IsSetLocked() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return status_.has_value(); }
    mutable absl::Mutex mutex_;
    std::optional<absl::Status> status_ ABSL_GUARDED_BY(mutex_);
  };

  UcxLink(const UcxTransportOptions& options,
          const SessionInfo& session,
          std::shared_ptr<PullTable> pulls,
          const Clock& clock,
          ChunkPool stage_chunks);

  // Copies the pages into chunks and has them sent, until all are on their way or there is an
  // answer. `message` is the first piece's.
  absl::Status SendPieces(StageMessage message,
                          std::span<const OutgoingPage> pages,
                          const Answer& answer,
                          absl::Time deadline);

  // On the worker's thread.
  absl::Status EnsurePeer();
  void FailAll(const absl::Status& status);
  void OnChunk(const ChunkMessage& chunk, UcxMessage& message);
  void OnEnd(const EndMessage& end);
  void SendCancel(uint64_t request_id);

  const UcxTransportOptions options_;
  const SessionInfo session_;
  const Clock& clock_;
  ChunkPool stage_chunks_;
  const std::shared_ptr<PullTable> pulls_;  // shared: with the session's other links.

  // Confined to the worker's thread.
  UcxPeerId peer_;                    // 0: not connected.
  std::atomic<bool> is_lost_{false};  // Since it was connected. Read on any thread.
  uint64_t hello_id_ = 0;             // The request by which peer_ was greeted.
  std::unordered_map<uint64_t, std::shared_ptr<Answer>> answers_;  // Shared with their waiters.

  // Last, so that its thread has ended before anything that it uses.
  std::unique_ptr<UcxWorker> worker_;
};

}  // namespace crumb
