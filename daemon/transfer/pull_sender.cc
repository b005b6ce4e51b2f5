// SPDX-License-Identifier: Apache-2.0
#include "daemon/transfer/pull_sender.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "proto/base/check.h"
#include "proto/base/status_macros.h"

namespace crumb {

absl::StatusOr<std::unique_ptr<PullSender>> PullSender::Create(const Options& options, Send send) {
  CRUMB_ASSIGN_OR_RETURN(ChunkPool chunks,
                         ChunkPool::Create(options.num_chunks, options.chunk_bytes));
  std::unique_ptr<PullSender> sender(new PullSender(options, std::move(send), std::move(chunks)));
  sender->thread_ = std::thread([raw = sender.get()] { raw->Run(); });
  pthread_setname_np(sender->thread_.native_handle(), "crumb-gather");
  return sender;
}

PullSender::PullSender(const Options& options, Send send, ChunkPool chunks)
    : options_(options), send_(std::move(send)), chunks_(std::move(chunks)) {}

PullSender::~PullSender() {
  Stop();
}

void PullSender::Stop() {
  Drop([](const Pull&) { return true; });
  {
    const absl::MutexLock lock(&mutex_);
    is_ending_ = true;
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

absl::Status PullSender::Add(UcxPeerId peer,
                             const PullMessage& request,
                             PullPlan plan,
                             ReadGuard guard) {
  if (request.chunk_bytes > options_.chunk_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("pull in chunks of ", request.chunk_bytes,
                                                   " bytes: this daemon sends at most ",
                                                   options_.chunk_bytes));
  }
  std::vector<PullPlan::Source> sources;
  sources.reserve(guard.pages().size());
  for (const PinnedPage& page : guard.pages()) {
    sources.push_back({&page.header, page.bytes.data()});
  }
  auto pull =
      // shared: see pulls_.
      std::make_shared<Pull>(Pull{peer, request.preamble.request_id, std::move(plan),
                                  std::move(guard), std::move(sources), 0});
  const absl::MutexLock lock(&mutex_);
  const auto of_peer = std::count_if(pulls_.begin(), pulls_.end(),
                                     [&](const auto& other) { return other->peer == peer; });
  if (is_ending_) {
    return absl::UnavailableError("the daemon is stopping");
  }
  if (of_peer >= options_.max_pulls_per_peer) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "this session has ", of_peer, " pulls under way, its limit: wait for one to end"));
  }
  pulls_.push_back(std::move(pull));
  return absl::OkStatus();
}

template <typename Predicate>
void PullSender::Drop(Predicate is_dropped) {
  // Their guards end after the lock: they call the store.
  std::vector<std::shared_ptr<Pull>> dropped;
  const absl::MutexLock lock(&mutex_);
  for (auto pull = pulls_.begin(); pull != pulls_.end();) {
    if (is_dropped(**pull)) {
      dropped.push_back(std::move(*pull));
      pull = pulls_.erase(pull);
    } else {
      ++pull;
    }
  }
}

void PullSender::Cancel(UcxPeerId peer, uint64_t request_id) {
  Drop([&](const Pull& pull) { return pull.peer == peer && pull.request_id == request_id; });
}

void PullSender::CancelAll(UcxPeerId peer) {
  Drop([&](const Pull& pull) { return pull.peer == peer; });
}

void PullSender::Ended(UcxPeerId peer) {
  const absl::MutexLock lock(&mutex_);
  const auto found = under_way_.find(peer);
  CRUMB_CHECK(found != under_way_.end() && num_under_way_ > 0, "a message that was under way");
  --num_under_way_;
  if (--found->second == 0) {
    under_way_.erase(found);
  }
}

size_t PullSender::num_pulls() const {
  const absl::MutexLock lock(&mutex_);
  return pulls_.size();
}

bool PullSender::MaySendLocked(UcxPeerId peer) const {
  const auto found = under_way_.find(peer);
  if (found == under_way_.end()) {
    return num_under_way_ < options_.num_chunks;
  }
  return found->second < options_.window &&
         num_under_way_ < options_.num_chunks - options_.num_chunks / 4;
}

bool PullSender::HasWork() const {
  return is_ending_ || std::any_of(pulls_.begin(), pulls_.end(), [this](const auto& pull) {
           mutex_.AssertReaderHeld();
           return MaySendLocked(pull->peer);
         });
}

PullSender::Turn PullSender::TakeTurnLocked() {
  const auto found = std::find_if(pulls_.begin(), pulls_.end(), [this](const auto& pull) {
    mutex_.AssertReaderHeld();
    return MaySendLocked(pull->peer);
  });
  std::shared_ptr<Pull> pull = std::move(*found);
  pulls_.erase(found);
  ++under_way_[pull->peer];
  ++num_under_way_;
  Turn turn{pull, pull->plan.PieceAt(pull->next_piece++)};
  if (pull->next_piece < pull->plan.num_pieces()) {
    pulls_.push_back(std::move(pull));
  }
  return turn;
}

PullSender::Ready PullSender::MakeReady(Turn turn) {
  const Pull& pull = *turn.pull;
  const PullPlan::Piece& piece = turn.piece;
  ChunkMessage message;
  message.preamble = {.op = PullOp::kChunk, .request_id = pull.request_id};
  message.offset = piece.offset;
  message.total_bytes = pull.plan.total_bytes();
  if (piece.entry != PullPlan::kGathered) {
    const std::byte* image = pull.sources[piece.entry].image;
    const UcxPeerId peer = pull.peer;
    return {peer, message, {image + piece.image_offset, piece.bytes}, std::move(turn.pull)};
  }
  // Chunks are given back before Ended is called, so there is one.
  std::optional<ChunkPool::Chunk> chunk = chunks_.TryTake();
  CRUMB_CHECK(chunk.has_value(), "a chunk for each message under way");
  const std::span<std::byte> target = chunk->bytes().first(piece.bytes);
  pull.plan.Gather(pull.sources, piece.offset, target);
  return {pull.peer, message, target, std::move(*chunk)};
}

void PullSender::Run() {
  while (true) {
    Turn turn;
    {
      const absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &PullSender::HasWork));
      if (is_ending_) {
        return;
      }
      turn = TakeTurnLocked();
    }
    send_(MakeReady(std::move(turn)));
  }
}

}  // namespace crumb
