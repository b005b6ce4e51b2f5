// SPDX-License-Identifier: Apache-2.0
#include "daemon/transfer/pull_sender.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "proto/base/check.h"
#include "proto/base/status_macros.h"

namespace crumb {

absl::StatusOr<PullSender> PullSender::Create(const Options& options) {
  CRUMB_ASSIGN_OR_RETURN(ChunkPool chunks,
                         ChunkPool::Create(options.num_chunks, options.chunk_bytes));
  return PullSender(options, std::move(chunks));
}

bool PullSender::Pull::GoesTo(UcxPeerId peer) const {
  return std::find(peers.begin(), peers.end(), peer) != peers.end();
}

absl::Status PullSender::Add(std::vector<UcxPeerId> peers,
                             const PullMessage& request,
                             PullPlan plan,
                             ReadGuard guard,
                             absl::Time now) {
  if (request.chunk_bytes > options_.chunk_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("pull in chunks of ", request.chunk_bytes,
                                                   " bytes: this daemon sends at most ",
                                                   options_.chunk_bytes));
  }
  const auto of_peer = std::count_if(pulls_.begin(), pulls_.end(), [&](const auto& other) {
    return other->progress->asked_by == peers.front();
  });
  if (of_peer >= options_.max_pulls_per_peer) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "this session has ", of_peer, " pulls under way, its limit: wait for one to end"));
  }
  std::vector<PullPlan::Source> sources;
  sources.reserve(guard.pages().size());
  for (const PinnedPage& page : guard.pages()) {
    sources.push_back({&page.header, page.bytes.data()});
  }
  // shared: see Ready.
  auto progress = std::make_shared<Progress>();
  progress->asked_by = peers.front();
  progress->request_id = request.preamble.request_id;
  progress->total_bytes = plan.total_bytes();
  progress->started_at = now;
  // shared: see pulls_.
  pulls_.push_back(std::make_shared<Pull>(Pull{std::move(peers), std::move(plan), std::move(guard),
                                               std::move(sources), std::move(progress)}));
  return absl::OkStatus();
}

template <typename Predicate>
void PullSender::Drop(Predicate is_dropped) {
  pulls_.erase(std::remove_if(pulls_.begin(), pulls_.end(),
                              [&](const auto& pull) { return is_dropped(*pull); }),
               pulls_.end());
}

void PullSender::Cancel(UcxPeerId peer, uint64_t request_id) {
  Drop([&](const Pull& pull) {
    return pull.GoesTo(peer) && pull.progress->request_id == request_id;
  });
}

void PullSender::Forget(UcxPeerId peer) {
  Drop([&](const Pull& pull) { return pull.progress->asked_by == peer; });
  for (const auto& pull : pulls_) {
    std::erase(pull->peers, peer);
  }
}

void PullSender::Ended(UcxPeerId peer, size_t bytes) {
  const auto found = under_way_.find(peer);
  CRUMB_CHECK(found != under_way_.end() && found->second.bytes >= bytes,
              "a message that was under way");
  --num_under_way_;
  found->second.bytes -= bytes;
  if (--found->second.messages == 0) {
    under_way_.erase(found);
  }
}

PullSender::UnderWay PullSender::UnderWayTo(UcxPeerId peer) const {
  const auto found = under_way_.find(peer);
  return found == under_way_.end() ? UnderWay() : found->second;
}

bool PullSender::MaySend(UcxPeerId peer) const {
  const UnderWay under_way = UnderWayTo(peer);
  const size_t reserve = under_way.messages == 0 ? 0 : options_.num_chunks / 4;
  return under_way.messages < options_.window && under_way.bytes < options_.window_bytes &&
         num_under_way_ < options_.num_chunks - reserve;
}

std::optional<UcxPeerId> PullSender::FreePeer(const Pull& pull) const {
  std::optional<UcxPeerId> best;
  for (const UcxPeerId peer : pull.peers) {
    if (MaySend(peer) && (!best.has_value() || UnderWayTo(peer).bytes < UnderWayTo(*best).bytes)) {
      best = peer;
    }
  }
  return best;
}

std::optional<PullSender::Ready> PullSender::Next() {
  for (auto at = pulls_.begin(); at != pulls_.end(); ++at) {
    const std::optional<UcxPeerId> peer = FreePeer(**at);
    if (!peer.has_value()) {
      continue;
    }
    const std::shared_ptr<Pull> pull = std::move(*at);  // shared: see pulls_.
    pulls_.erase(at);
    const bool is_gathered =
        pull->HasGathered() && (UnderWayTo(*peer).messages > 0 || !pull->HasImages());
    Ready ready = is_gathered ? Gather(*pull, *peer) : TakeImages(pull, *peer);
    UnderWay& under_way = under_way_[*peer];
    ++under_way.messages;
    under_way.bytes += ready.payload.size();
    ++num_under_way_;
    if (pull->HasGathered() || pull->HasImages()) {
      pulls_.push_back(pull);  // The others' turn is next.
    }
    return ready;
  }
  return std::nullopt;
}

PullSender::Ready PullSender::Gather(Pull& pull, UcxPeerId peer) {
  const PullPlan::Piece piece = pull.plan.PieceAt(pull.next_gathered++);
  // Chunks are given back before Ended is called, so there is one.
  std::optional<ChunkPool::Chunk> chunk = chunks_.TryTake();
  CRUMB_CHECK(chunk.has_value(), "a chunk for each message under way");
  const std::span<std::byte> target = chunk->bytes().first(piece.bytes);
  pull.plan.Gather(pull.sources, piece.offset, target);
  return {peer, MakeMessage(pull, piece.offset), target, std::move(*chunk), pull.progress};
}

// shared: see pulls_.
PullSender::Ready PullSender::TakeImages(const std::shared_ptr<Pull>& pull, UcxPeerId peer) const {
  const auto begin_of = [&pull](const PullPlan::Piece& piece) {
    return pull->sources[piece.entry].image + piece.image_offset;
  };
  const PullPlan::Piece first = pull->plan.PieceAt(pull->next_image++);
  std::span<const std::byte> images(begin_of(first), first.bytes);
  // Short messages while something is to be gathered, which need not wait for long then.
  while (pull->HasImages() && !pull->HasGathered()) {
    const PullPlan::Piece next = pull->plan.PieceAt(pull->next_image);
    if (begin_of(next) != images.data() + images.size() ||
        images.size() + next.bytes > options_.max_image_bytes) {
      break;
    }
    images = {images.data(), images.size() + next.bytes};
    ++pull->next_image;
  }
  return {peer, MakeMessage(*pull, first.offset), images, pull, pull->progress};
}

ChunkMessage PullSender::MakeMessage(const Pull& pull, size_t offset) {
  ChunkMessage message;
  message.preamble = {.op = PullOp::kChunk, .request_id = pull.progress->request_id};
  message.offset = offset;
  message.total_bytes = pull.progress->total_bytes;
  return message;
}

}  // namespace crumb
