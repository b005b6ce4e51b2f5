// SPDX-License-Identifier: Apache-2.0
//
// A few threads that do one thing together, many times: the matrix products of a model are too
// short to start threads for. The caller is one of them. Confined to the thread that made it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"

namespace crumb::example {

class WorkerTeam {
 public:
  // `num_workers` >= 1, the caller among them.
  explicit WorkerTeam(uint32_t num_workers);
  ~WorkerTeam();
  WorkerTeam(const WorkerTeam&) = delete;
  WorkerTeam& operator=(const WorkerTeam&) = delete;

  uint32_t num_workers() const { return static_cast<uint32_t>(threads_.size()) + 1; }

  // Calls work(0) here and work(1) .. work(num_workers - 1) on the other threads; returns when all
  // have returned.
  void Run(const std::function<void(uint32_t worker)>& work);

 private:
  void Serve(uint32_t worker);

  absl::Mutex mutex_;
  const std::function<void(uint32_t)>* work_ ABSL_GUARDED_BY(mutex_) = nullptr;
  uint64_t round_ ABSL_GUARDED_BY(mutex_) = 0;  // Of work; a thread does each once.
  uint32_t num_busy_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace crumb::example
