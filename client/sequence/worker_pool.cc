// SPDX-License-Identifier: Apache-2.0
#include "client/sequence/worker_pool.h"

#include "proto/base/check.h"

namespace crumb {

struct WorkerPool::Job {
  Job(Item item_work, size_t item_count) : work(item_work), num_items(item_count) {}

  const Item work;
  const size_t num_items;
  std::atomic<size_t> next_item{0};
  absl::Mutex mutex;
  size_t failed_item ABSL_GUARDED_BY(mutex) = 0;
  absl::Status error ABSL_GUARDED_BY(mutex);
};

WorkerPool::WorkerPool(uint32_t num_threads) {
  CRUMB_CHECK(num_threads >= 1, "the caller is a thread of its pool");
  for (uint32_t worker = 1; worker < num_threads; ++worker) {
    threads_.emplace_back([this, worker] { Main(worker); });
  }
}

WorkerPool::~WorkerPool() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) {
    thread.join();
  }
}

void WorkerPool::RunItems(Job* job, uint32_t worker) {
  // Relaxed: an item's inputs were published by the mutex that handed the job over.
  for (size_t item = job->next_item.fetch_add(1, std::memory_order_relaxed); item < job->num_items;
       item = job->next_item.fetch_add(1, std::memory_order_relaxed)) {
    if (absl::Status status = job->work(item, worker); !status.ok()) {
      absl::MutexLock lock(&job->mutex);
      if (job->error.ok() || item < job->failed_item) {
        job->failed_item = item;
        job->error = std::move(status);
      }
    }
  }
}

absl::Status WorkerPool::ParallelFor(size_t num_items, size_t multiply_adds, Item work) {
  Job job(work, num_items);
  const bool spread = !threads_.empty() && num_items > 1 && multiply_adds >= kMinParallelWork;
  if (spread) {
    absl::MutexLock lock(&mutex_);
    CRUMB_CHECK(job_ == nullptr, "one loop at a time");
    job_ = &job;
    ++num_jobs_;
    num_running_ = threads_.size();
  }
  RunItems(&job, 0);
  if (spread) {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](size_t* running) { return *running == 0; }, &num_running_));
    job_ = nullptr;
  }
  absl::MutexLock lock(&job.mutex);
  return job.error;
}

void WorkerPool::Main(uint32_t worker) {
  uint64_t jobs_seen = 0;
  const auto has_news = [&] {
    mutex_.AssertReaderHeld();
    return stopping_ || num_jobs_ != jobs_seen;
  };
  for (;;) {
    Job* job = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&has_news));
      if (stopping_) {
        return;
      }
      jobs_seen = num_jobs_;
      job = job_;
    }
    RunItems(job, worker);
    absl::MutexLock lock(&mutex_);
    --num_running_;
  }
}

}  // namespace crumb
