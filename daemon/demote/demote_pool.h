// SPDX-License-Identifier: Apache-2.0
//
// The threads that copy, check and demote published pages: a fixed number, fed by a bounded queue
// of jobs. Threads take one page at a time, from each publish in turn, so a long publish does not
// hold up a short one, and a single publish uses all threads. The jobs of one publish, which may
// come in parts, have one turn together and run in their order: what came first is done first, and
// its staging memory free again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace crumb {

// Buffers of one pool thread, kept from page to page: at most the BF16 rows of one KV head each.
struct DemoteScratch {
  std::vector<std::byte> incoming;
  std::vector<std::byte> stored;
};

// Pages of one publish.
class DemoteJob {
 public:
  virtual ~DemoteJob() = default;

  // Jobs of the same have one turn together; 0: the job is alone. Constant.
  virtual uint64_t group() const { return 0; }

  // At least 1. Constant.
  virtual size_t num_pages() const = 0;
  // Each page once, on any pool thread, several at a time; none any more after one has failed.
  virtual absl::Status RunPage(size_t index, DemoteScratch& scratch) = 0;
  // Once, on a pool thread (or the one that calls Stop), when no page runs any more: with OK, the
  // first error, or UNAVAILABLE because the pool stopped.
  virtual void Finish(absl::Status status) = 0;
};

// Thread-safe.
class DemotePool {
 public:
  struct Options {
    uint32_t num_threads = 1;
    uint32_t max_jobs = 256;  // Queued or running.
  };

  explicit DemotePool(const Options& options);
  ~DemotePool() { Stop(); }
  DemotePool(const DemotePool&) = delete;
  DemotePool& operator=(const DemotePool&) = delete;

  // Never blocks. RESOURCE_EXHAUSTED: max_jobs are there already, UNAVAILABLE: stopped; the job is
  // then destroyed without Finish.
  absl::Status Submit(std::unique_ptr<DemoteJob> job);

  // Refuses new jobs, waits for the pages that run now, ends the other jobs with UNAVAILABLE and
  // joins the threads. Idempotent; not to be called from a job.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

  uint32_t num_jobs() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // One job in the pool. Guarded by the pool's mutex but for `job`, which is constant.
  struct State {
    std::unique_ptr<DemoteJob> job;
    size_t num_pages = 0;
    size_t next_page = 0;  // num_pages: none is left to start.
    size_t running = 0;
    absl::Status status;
  };

  // Jobs with pages left to start.
  struct Group {
    uint64_t id = 0;
    // shared: by the queue, while pages are left to start, and the threads that run its pages.
    std::deque<std::shared_ptr<State>> jobs;
  };

  void RunThread() ABSL_LOCKS_EXCLUDED(mutex_);
  void EnqueueLocked(std::shared_ptr<State> state) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The job whose page is to be started next; it has its turn again after all others.
  std::shared_ptr<State> TakeTurnLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RemoveLocked(const State& state) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasWorkLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopped_ || !queue_.empty();
  }
  // Starts no further page of `state`. Returns whether the caller is to finish it.
  bool FailLocked(State& state, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  mutable absl::Mutex mutex_;
  std::deque<Group> queue_ ABSL_GUARDED_BY(mutex_);  // In the order of their turns.
  uint32_t num_jobs_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;  // Constant until Stop.
};

}  // namespace crumb
