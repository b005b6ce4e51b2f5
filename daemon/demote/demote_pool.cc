// SPDX-License-Identifier: Apache-2.0
#include "daemon/demote/demote_pool.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "proto/base/check.h"

// shared: the header says by whom.

namespace crumb {

DemotePool::DemotePool(const Options& options) : options_(options) {
  CRUMB_CHECK(options.num_threads >= 1 && options.max_jobs >= 1, "a pool has threads and a queue");
  threads_.reserve(options.num_threads);
  for (uint32_t i = 0; i < options.num_threads; ++i) {
    threads_.emplace_back([this] { RunThread(); });
  }
}

absl::Status DemotePool::Submit(std::unique_ptr<DemoteJob> job) {
  auto state = std::make_shared<State>();
  state->num_pages = job->num_pages();
  state->job = std::move(job);
  CRUMB_CHECK(state->num_pages >= 1, "a job has pages");
  absl::MutexLock lock(&mutex_);
  if (stopped_) {
    return absl::UnavailableError("the daemon is draining: publish to it after its restart");
  }
  if (num_jobs_ >= options_.max_jobs) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the demotion queue is full: ", num_jobs_,
        " publishes, or parts of them, wait or are being written (threads: ", options_.num_threads,
        "), and [demote] queue is ", options_.max_jobs,
        ". What was staged stays: repeat the commit or the write later, or abort and go on "
        "without; raise "
        "[demote] threads or queue if this lasts"));
  }
  ++num_jobs_;
  EnqueueLocked(std::move(state));
  return absl::OkStatus();
}

void DemotePool::EnqueueLocked(std::shared_ptr<State> state) {
  const uint64_t id = state->job->group();
  const auto group = std::find_if(queue_.begin(), queue_.end(), [id](const Group& waiting) {
    return id != 0 && waiting.id == id;
  });
  if (group != queue_.end()) {
    group->jobs.push_back(std::move(state));
    return;
  }
  queue_.push_back({.id = id, .jobs = {}});
  queue_.back().jobs.push_back(std::move(state));
}

std::shared_ptr<DemotePool::State> DemotePool::TakeTurnLocked() {
  Group group = std::move(queue_.front());
  queue_.pop_front();
  std::shared_ptr<State> state = group.jobs.front();
  if (state->next_page + 1 == state->num_pages) {
    group.jobs.pop_front();
  }
  if (!group.jobs.empty()) {
    queue_.push_back(std::move(group));
  }
  return state;
}

void DemotePool::RemoveLocked(const State& state) {
  for (auto group = queue_.begin(); group != queue_.end(); ++group) {
    const auto found =
        std::find_if(group->jobs.begin(), group->jobs.end(),
                     [&state](const auto& waiting) { return waiting.get() == &state; });
    if (found == group->jobs.end()) {
      continue;
    }
    group->jobs.erase(found);
    if (group->jobs.empty()) {
      queue_.erase(group);
    }
    return;
  }
}

uint32_t DemotePool::num_jobs() const {
  absl::MutexLock lock(&mutex_);
  return num_jobs_;
}

bool DemotePool::FailLocked(State& state, const absl::Status& status) {
  state.status.Update(status);
  state.next_page = state.num_pages;
  return state.running == 0;
}

void DemotePool::RunThread() {
  DemoteScratch scratch;
  absl::MutexLock lock(&mutex_);
  while (true) {
    mutex_.Await(absl::Condition(this, &DemotePool::HasWorkLocked));
    if (stopped_) {
      return;
    }
    const std::shared_ptr<State> state = TakeTurnLocked();
    const size_t page = state->next_page++;
    ++state->running;

    mutex_.Unlock();
    absl::Status status = state->job->RunPage(page, scratch);
    mutex_.Lock();

    --state->running;
    if (!status.ok() && state->next_page < state->num_pages) {
      RemoveLocked(*state);
    }
    const bool ended = status.ok() ? state->running == 0 && state->next_page == state->num_pages
                                   : FailLocked(*state, status);
    if (ended) {
      absl::Status result = state->status;
      mutex_.Unlock();
      state->job->Finish(std::move(result));
      state->job.reset();  // Before the count, which tells those who wait that all is over.
      mutex_.Lock();
      --num_jobs_;
    }
  }
}

void DemotePool::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) {
      thread.join();
    }
  }
  std::deque<std::shared_ptr<State>> left;
  {
    absl::MutexLock lock(&mutex_);
    for (const Group& group : queue_) {
      left.insert(left.end(), group.jobs.begin(), group.jobs.end());
    }
    queue_.clear();
  }
  for (const std::shared_ptr<State>& state : left) {
    CRUMB_CHECK(state->running == 0, "no thread is left to run a page");
    state->job->Finish(absl::UnavailableError(
        "the daemon stopped before the publish was written: publish to it after its restart"));
    state->job.reset();
    absl::MutexLock lock(&mutex_);
    --num_jobs_;
  }
}

}  // namespace crumb
