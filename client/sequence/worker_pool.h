// SPDX-License-Identifier: Apache-2.0
//
// A few threads that share one loop at a time: what a Sequence spreads its KV heads over. The
// caller is one of them, so a pool of one thread starts none.
//
// Thread-compatible: one ParallelFor at a time, not from inside another.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace crumb {

class WorkerPool {
 public:
  // A loop of fewer multiply-adds than this runs on the caller: it takes some 100 us, and waking a
  // sleeping thread costs 50 us on the machines at hand.
  static constexpr size_t kMinParallelWork = size_t{1} << 20;

  // `worker` < num_threads() names the thread that runs an item, to index scratch memory by.
  using Item = absl::FunctionRef<absl::Status(size_t item, uint32_t worker)>;

  explicit WorkerPool(uint32_t num_threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  uint32_t num_threads() const { return static_cast<uint32_t>(threads_.size()) + 1; }

  // Runs `work` for each item in [0, num_items) and returns when all have ended: OK, or the error
  // of the lowest failed item, whatever the timing. `multiply_adds` is the whole loop's cost.
  absl::Status ParallelFor(size_t num_items, size_t multiply_adds, Item work);

 private:
  struct Job;
  void Main(uint32_t worker);
  static void RunItems(Job* job, uint32_t worker);

  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t num_jobs_ ABSL_GUARDED_BY(mutex_) = 0;
  Job* job_ ABSL_GUARDED_BY(mutex_) = nullptr;      // Null between loops.
  size_t num_running_ ABSL_GUARDED_BY(mutex_) = 0;  // Threads that have not finished job_.
  std::vector<std::thread> threads_;
};

}  // namespace crumb
