// SPDX-License-Identifier: Apache-2.0
//
// Makes messages of the streams of pulls: which goes next, to whom, and when. Page images are sent
// from the arena as they lie, those that follow each other there in one message. What is gathered
// is copied into chunks, and goes first; an image goes ahead only to a peer that has nothing to
// take: gathering is slower than receiving, so that the peer would wait.
//
// A pull goes to all peers of a group, each message to the one that has the fewest bytes under
// way, so that they share it at the rates at which they take it. Pulls take turns by the message; a
// peer's window bounds what is under way to it, and the last quarter of all messages is only for
// peers that have none, so that peers that stopped cannot take all.
//
// A pull's pages are held (ReadGuard) until it has been dropped or its last message has been taken,
// and until no message with a part of an image is under way: a peer that stops holds them until the
// worker's stall_timeout has closed it.
//
// Confined to one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

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
    size_t max_image_bytes = size_t{4} << 20;  // Of a message with more than one piece.
    // Under way to a peer at most: messages, and bytes before one more may go.
    uint32_t window = 16;
    size_t window_bytes = size_t{8} << 20;
    uint32_t max_pulls_per_peer = 64;
  };
  // A pull, to whoever is told that its messages have ended; arrived_bytes and has_failed are kept
  // there.
  struct Progress {
    UcxPeerId asked_by;
    uint64_t request_id = 0;
    size_t total_bytes = 0;
    absl::Time started_at;
    size_t arrived_bytes = 0;
    bool has_failed = false;
  };
  // A message that is ready. Whoever gets it keeps `memory` until the payload is free, then
  // destroys it and calls Ended once.
  struct Ready {
    UcxPeerId peer;
    ChunkMessage message;
    std::span<const std::byte> payload;
    // What the payload lies in. shared: with other messages of the pull, whose pages it may be.
    std::variant<ChunkPool::Chunk, std::shared_ptr<const void>> memory;
    std::shared_ptr<Progress> progress;  // shared: with the pull's other messages.

    bool is_copy() const { return std::holds_alternative<ChunkPool::Chunk>(memory); }
  };

  static absl::StatusOr<PullSender> Create(const Options& options);

  // Queues a pull for `peers`, the first of which asked for it; `guard` holds its entries in their
  // order and must fit `plan`. INVALID_ARGUMENT: its chunks are larger than this server's.
  // RESOURCE_EXHAUSTED: the peer has too many.
  absl::Status Add(std::vector<UcxPeerId> peers,
                   const PullMessage& request,
                   PullPlan plan,
                   ReadGuard guard,
                   absl::Time now);
  // The next message, if one may go now; it copies at most chunk_bytes. Without one, there is none
  // until Add or Ended is called.
  std::optional<Ready> Next();
  // A message of the peer, of so many bytes, is no longer under way.
  void Ended(UcxPeerId peer, size_t bytes);
  // Drops a pull that goes to the peer. Its messages under way stay under way.
  void Cancel(UcxPeerId peer, uint64_t request_id);
  // Makes no more messages for a peer that is gone, and drops the pulls that it asked for.
  void Forget(UcxPeerId peer);

 private:
  struct Pull {
    std::vector<UcxPeerId> peers;
    PullPlan plan;
    ReadGuard guard;
    std::vector<PullPlan::Source> sources;  // Into guard.
    std::shared_ptr<Progress> progress;     // shared: see Ready.
    // Numbers of the pieces that go next; at the end of each kind: none is left.
    size_t next_gathered = 0;
    size_t next_image = plan.num_gathered_pieces();

    bool HasGathered() const { return next_gathered < plan.num_gathered_pieces(); }
    bool HasImages() const { return next_image < plan.num_pieces(); }
    bool GoesTo(UcxPeerId peer) const;
  };

  PullSender(const Options& options, ChunkPool chunks)
      : options_(options), chunks_(std::move(chunks)) {}
  struct UnderWay {
    uint32_t messages = 0;
    size_t bytes = 0;
  };
  UnderWay UnderWayTo(UcxPeerId peer) const;
  bool MaySend(UcxPeerId peer) const;
  // Of the pull's peers that may have another message, the one that has the fewest bytes to take.
  std::optional<UcxPeerId> FreePeer(const Pull& pull) const;
  Ready Gather(Pull& pull, UcxPeerId peer);
  Ready TakeImages(const std::shared_ptr<Pull>& pull, UcxPeerId peer) const;
  static ChunkMessage MakeMessage(const Pull& pull, size_t offset);
  template <typename Predicate>
  void Drop(Predicate is_dropped);

  const Options options_;
  ChunkPool chunks_;
  std::deque<std::shared_ptr<Pull>> pulls_;  // shared: with messages, which keep its pages.
  std::unordered_map<UcxPeerId, UnderWay> under_way_;  // Of peers that have a message.
  size_t num_under_way_ = 0;
};

}  // namespace crumb
