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
                                  std::move(guard), std::move(sources)});
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
  const bool has_gathered = pull->next_gathered < pull->plan.num_gathered_pieces();
  const bool has_images = pull->next_image < pull->plan.num_pieces();
  Turn turn;
  if (has_gathered && (pull->is_gathered_next || !has_images)) {
    const PullPlan::Piece piece = pull->plan.PieceAt(pull->next_gathered++);
    turn = {pull, piece.offset, piece.bytes, nullptr};
  } else {
    turn = TakeImagesLocked(pull);
  }
  pull->is_gathered_next = !pull->is_gathered_next;
  if (!pull->IsOver()) {
    pulls_.push_back(std::move(pull));
  }
  return turn;
}

// shared: see Turn.
PullSender::Turn PullSender::TakeImagesLocked(std::shared_ptr<Pull> pull) const {
  const auto begin_of = [&pull](const PullPlan::Piece& piece) {
    return pull->sources[piece.entry].image + piece.image_offset;
  };
  const PullPlan::Piece first = pull->plan.PieceAt(pull->next_image++);
  Turn turn{pull, first.offset, first.bytes, begin_of(first)};
  while (pull->next_image < pull->plan.num_pieces()) {
    const PullPlan::Piece next = pull->plan.PieceAt(pull->next_image);
    if (begin_of(next) != turn.images + turn.bytes ||
        turn.bytes + next.bytes > options_.max_image_bytes) {
      break;
    }
    turn.bytes += next.bytes;
    ++pull->next_image;
  }
  return turn;
}

PullSender::Ready PullSender::MakeReady(Turn turn) {
  const Pull& pull = *turn.pull;
  const UcxPeerId peer = pull.peer;
  ChunkMessage message;
  message.preamble = {.op = PullOp::kChunk, .request_id = pull.request_id};
  message.offset = turn.offset;
  message.total_bytes = pull.plan.total_bytes();
  if (turn.images != nullptr) {
    return {peer, message, {turn.images, turn.bytes}, std::move(turn.pull)};
  }
  // Chunks are given back before Ended is called, so there is one.
  std::optional<ChunkPool::Chunk> chunk = chunks_.TryTake();
  CRUMB_CHECK(chunk.has_value(), "a chunk for each message under way");
  const std::span<std::byte> target = chunk->bytes().first(turn.bytes);
  pull.plan.Gather(pull.sources, turn.offset, target);
  return {peer, message, target, std::move(*chunk)};
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
