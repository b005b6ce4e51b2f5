// SPDX-License-Identifier: Apache-2.0
#include "client/transport/pull_verifier.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

namespace crumb {

PullVerifier::PullVerifier() : thread_([this] { Run(); }) {
  pthread_setname_np(thread_.native_handle(), "crumb-verify");
}

PullVerifier::~PullVerifier() {
  {
    const absl::MutexLock lock(&mutex_);
    is_ending_ = true;
  }
  thread_.join();
}

// shared: see UcxPull::Create.
void PullVerifier::Add(std::shared_ptr<UcxPull> pull) {
  const absl::MutexLock lock(&mutex_);
  if (std::find(waiting_.begin(), waiting_.end(), pull) == waiting_.end()) {
    waiting_.push_back(std::move(pull));
  }
}

void PullVerifier::Run() {
  while (true) {
    std::shared_ptr<UcxPull> pull;
    {
      const absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &PullVerifier::HasWork));
      if (is_ending_) {
        return;
      }
      pull = std::move(waiting_.front());
      waiting_.pop_front();
    }
    pull->Verify();
  }
}

}  // namespace crumb
