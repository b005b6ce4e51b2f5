// SPDX-License-Identifier: Apache-2.0
//
// Makes messages of the streams of pulls, and hands them over to be sent. What is gathered is
// copied into chunks on a thread of its own, so that the UCX worker's thread never copies; page
// images are sent from the arena as they lie, those that follow each other there in one message. An
// image and a gathered chunk go in turns: gathering is slower than receiving, so that the receiver
// would wait. Pulls take turns by the message; a peer has at
// most `window` messages under way, and the last quarter of them is only for peers that have none,
// so that peers that stopped cannot take all.
//
// A pull's pages are held (ReadGuard) until it has been dropped or its last message has been handed
// over, and until no message with a part of an image is under way: a peer that stops holds them
// until the worker's stall_timeout has closed it.
//
// Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <unordered_map>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

#include "client/transport/transfer_memory.h"
#include "client/transport/ucx_worker.h"
#include "daemon/store/page_store.h"
#include "proto/wire/pull_message.h"
#include "proto/wire/pull_plan.h"

namespace crumb {

class PullSender {
 public:
  struct Options {
    size_t num_chunks = 64;
    size_t chunk_bytes = size_t{1} << 20;
    size_t max_image_bytes = size_t{8} << 20;  // Of a message with more than one piece.
    uint32_t window = 16;
    uint32_t max_pulls_per_peer = 64;
  };
  // A message that is ready. Whoever gets it keeps `memory` until the payload is free, then
  // destroys it and calls Ended(peer) once.
  struct Ready {
    UcxPeerId peer;
    ChunkMessage message;
    std::span<const std::byte> payload;
    // What the payload lies in. shared: with other messages of the pull, whose pages it may be.
    std::variant<ChunkPool::Chunk, std::shared_ptr<const void>> memory;
  };
  using Send = std::function<void(Ready)>;  // Called on the gathering thread. Must not block.

  static absl::StatusOr<std::unique_ptr<PullSender>> Create(const Options& options, Send send);
  // As Stop.
  ~PullSender();
  PullSender(const PullSender&) = delete;
  PullSender& operator=(const PullSender&) = delete;

  // Queues a pull; `guard` holds its entries in their order and must fit `plan`. INVALID_ARGUMENT:
  // its chunks are larger than this server's. RESOURCE_EXHAUSTED: the peer has too many.
  absl::Status Add(UcxPeerId peer, const PullMessage& request, PullPlan plan, ReadGuard guard);
  // Drops a pull, or all of a peer. Messages under way stay under way.
  void Cancel(UcxPeerId peer, uint64_t request_id);
  void CancelAll(UcxPeerId peer);
  // A message of the peer is no longer under way.
  void Ended(UcxPeerId peer);

  // Drops all pulls and joins the thread. Idempotent.
  void Stop();
  size_t num_pulls() const;

 private:
  struct Pull {
    UcxPeerId peer;
    uint64_t request_id;
    PullPlan plan;
    ReadGuard guard;
    std::vector<PullPlan::Source> sources;  // Into guard.
    // Guarded by mutex_. Numbers of the pieces that go next; at the end of each kind: none is left.
    size_t next_gathered = 0;
    size_t next_image = plan.num_gathered_pieces();
    bool is_gathered_next = false;

    bool IsOver() const {
      return next_gathered == plan.num_gathered_pieces() && next_image == plan.num_pieces();
    }
  };
  // What goes next of a pull: a message, and where its payload is, or that it is to be gathered.
  struct Turn {
    std::shared_ptr<Pull> pull;
    size_t offset = 0;  // In the stream.
    size_t bytes = 0;
    const std::byte* images = nullptr;  // Null: to be gathered.
  };

  PullSender(const Options& options, Send send, ChunkPool chunks);
  void Run();
  bool HasWork() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  bool MaySendLocked(UcxPeerId peer) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  Ready MakeReady(Turn turn);
  Turn TakeTurnLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Turn TakeImagesLocked(std::shared_ptr<Pull> pull) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  template <typename Predicate>
  void Drop(Predicate is_dropped);

  const Options options_;
  const Send send_;
  ChunkPool chunks_;

  mutable absl::Mutex mutex_;
  // shared: with the gathering thread, while it copies without the lock, and with messages.
  std::deque<std::shared_ptr<Pull>> pulls_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<UcxPeerId, uint32_t> under_way_
      ABSL_GUARDED_BY(mutex_);  // Messages of a peer.
  size_t num_under_way_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace crumb
