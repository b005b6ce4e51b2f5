// SPDX-License-Identifier: Apache-2.0
#include "client/example/worker_team.h"

namespace crumb::example {

WorkerTeam::WorkerTeam(uint32_t num_workers) {
  for (uint32_t worker = 1; worker < num_workers; ++worker) {
    threads_.emplace_back([this, worker] { Serve(worker); });
  }
}

WorkerTeam::~WorkerTeam() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) {
    thread.join();
  }
}

void WorkerTeam::Run(const std::function<void(uint32_t)>& work) {
  if (threads_.empty()) {
    work(0);
    return;
  }
  {
    absl::MutexLock lock(&mutex_);
    work_ = &work;
    num_busy_ = static_cast<uint32_t>(threads_.size());
    ++round_;
  }
  work(0);
  absl::MutexLock lock(&mutex_);
  const auto all_done = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return num_busy_ == 0; };
  mutex_.Await(absl::Condition(&all_done));
}

void WorkerTeam::Serve(uint32_t worker) {
  uint64_t seen = 0;
  const auto has_work = [this, &seen]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopping_ || round_ != seen;
  };
  for (;;) {
    const std::function<void(uint32_t)>* work = nullptr;
    {
      absl::MutexLock lock(&mutex_, absl::Condition(&has_work));
      if (stopping_) {
        return;
      }
      seen = round_;
      work = work_;
    }
    (*work)(worker);
    absl::MutexLock lock(&mutex_);
    --num_busy_;
  }
}

}  // namespace crumb::example
