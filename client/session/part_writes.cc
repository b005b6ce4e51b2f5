// SPDX-License-Identifier: Apache-2.0
#include "client/session/part_writes.h"

#include <algorithm>
#include <utility>

#include "proto/base/check.h"

namespace crumb {

bool MeansNoAnswer(const absl::Status& status) {
  return absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status) ||
         absl::IsCancelled(status);
}

PartWrites::PartWrites(const Options& options,
                       ControlPlane& control,
                       const Clock& clock,
                       absl::Time deadline)
    : options_(options),
      control_(control),
      clock_(clock),
      deadline_(deadline),
      slots_(options.num_slots) {
  CRUMB_CHECK(options.num_slots > 0, "a part needs a slot");
}

PartWrites::~PartWrites() {
  AwaitAnswers();
}

bool PartWrites::HasFreeLocked() const {
  return std::any_of(slots_.begin(), slots_.end(),
                     [](const Slot& slot) { return slot.state == State::kFree; });
}

bool PartWrites::IsIdleLocked() const {
  return std::all_of(slots_.begin(), slots_.end(),
                     [](const Slot& slot) { return slot.state == State::kFree; });
}

absl::Time PartWrites::NextRetryLocked() const {
  absl::Time next = absl::InfiniteFuture();
  for (const Slot& slot : slots_) {
    if (slot.state == State::kRefused) {
      next = std::min(next, slot.retry_at);
    }
  }
  return next;
}

std::vector<size_t> PartWrites::TakeDueLocked(absl::Time now) {
  std::vector<size_t> due;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].state == State::kRefused && slots_[slot].retry_at <= now) {
      slots_[slot].state = State::kTaken;
      due.push_back(slot);
    }
  }
  return due;
}

absl::Status PartWrites::AwaitProgress(bool (PartWrites::*is_done)() const) {
  absl::MutexLock lock(&mutex_);
  const auto may_go_on = [this, is_done] {
    mutex_.AssertReaderHeld();
    return !error_.ok() || (this->*is_done)();
  };
  while (!may_go_on()) {
    const std::vector<size_t> due = TakeDueLocked(clock_.Now());
    if (due.empty()) {
      const absl::Time before = NextRetryLocked();
      const auto has_news = [&] {
        mutex_.AssertReaderHeld();
        return may_go_on() || NextRetryLocked() != before;
      };
      mutex_.AwaitWithTimeout(absl::Condition(&has_news), before - clock_.Now());
      continue;
    }
    mutex_.Unlock();
    for (const size_t slot : due) {
      Send(slot);
    }
    mutex_.Lock();
  }
  return error_;
}

absl::StatusOr<size_t> PartWrites::AwaitSlot() {
  if (absl::Status status = AwaitProgress(&PartWrites::HasFreeLocked); !status.ok()) {
    return status;
  }
  absl::MutexLock lock(&mutex_);
  const auto free = std::find_if(slots_.begin(), slots_.end(),
                                 [](const Slot& slot) { return slot.state == State::kFree; });
  free->state = State::kTaken;
  free->backoff = options_.first_backoff;
  return static_cast<size_t>(free - slots_.begin());
}

void PartWrites::Start(size_t slot, CommitParams part) {
  {
    absl::MutexLock lock(&mutex_);
    CRUMB_CHECK(slots_[slot].state == State::kTaken, "a part has taken its slot");
    slots_[slot].part = std::move(part);
  }
  Send(slot);
}

void PartWrites::Send(size_t slot) {
  const CommitParams* part = nullptr;
  {
    absl::MutexLock lock(&mutex_);
    slots_[slot].state = State::kWriting;
    ++num_writing_;
    part = &slots_[slot].part;  // No one changes it before the answer.
  }
  control_.StartWrite(*part, deadline_,
                      [this, slot](const absl::Status& status) { OnAnswer(slot, status); });
}

void PartWrites::OnAnswer(size_t slot, const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  Slot& answered = slots_[slot];
  --num_writing_;
  answered.state = State::kFree;
  const absl::Time retry_at = clock_.Now() + answered.backoff;
  if (absl::IsResourceExhausted(status) && retry_at < deadline_) {
    // What was handed over stays with the daemon, so the call alone is repeated.
    answered.state = State::kRefused;
    answered.retry_at = retry_at;
    answered.backoff = std::min(2 * answered.backoff, options_.max_backoff);
    return;
  }
  lacks_answer_ |= MeansNoAnswer(status);
  error_.Update(status);
}

absl::Status PartWrites::AwaitAll() {
  return AwaitProgress(&PartWrites::IsIdleLocked);
}

bool PartWrites::AwaitAnswers() {
  absl::MutexLock lock(&mutex_);
  const auto none_is_due = [this] {
    mutex_.AssertReaderHeld();
    return num_writing_ == 0;
  };
  mutex_.Await(absl::Condition(&none_is_due));
  return lacks_answer_;
}

}  // namespace crumb
