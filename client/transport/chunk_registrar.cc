// SPDX-License-Identifier: Apache-2.0
#include "client/transport/chunk_registrar.h"

#include <utility>

#include "crumb/cuda/transfer.h"
#include "proto/base/status_macros.h"

namespace crumb {

namespace {

constexpr int kRest = 9;  // Times as long as a registration took.

}  // namespace

ChunkRegistrar::ChunkRegistrar(int gpu, const Clock& clock)
    : ChunkRegistrar(
          [gpu](MappedChunk& chunk) {
            const ScopedGpu current(gpu);
            CRUMB_RETURN_IF_ERROR(current.status());
            return chunk.RegisterWithGpu();
          },
          clock) {}

ChunkRegistrar::ChunkRegistrar(Register registers, const Clock& clock)
    : registers_(std::move(registers)), clock_(clock), thread_([this] { Run(); }) {}

ChunkRegistrar::~ChunkRegistrar() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    pending_.clear();
  }
  thread_.join();
}

void ChunkRegistrar::SetChunks(const std::vector<std::shared_ptr<MappedChunk>>& chunks) {
  absl::MutexLock lock(&mutex_);
  if (!stopping_) {
    pending_.assign(chunks.begin(), chunks.end());
  }
}

// shared: see pending_.
std::shared_ptr<MappedChunk> ChunkRegistrar::Next() {
  const auto has_work = [this] {
    mutex_.AssertReaderHeld();
    return stopping_ || !pending_.empty();
  };
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&has_work));
  if (stopping_) {
    return nullptr;
  }
  std::shared_ptr<MappedChunk> chunk = std::move(pending_.front());  // shared: see pending_.
  pending_.pop_front();
  return chunk;
}

void ChunkRegistrar::Run() {
  while (const std::shared_ptr<MappedChunk> chunk = Next()) {  // shared: see pending_.
    const absl::Time began = clock_.Now();
    const absl::Status status = registers_(*chunk);
    const absl::Duration rest = kRest * (clock_.Now() - began);
    absl::MutexLock lock(&mutex_);
    if (!status.ok()) {
      stopping_ = true;
      pending_.clear();
    }
    mutex_.AwaitWithTimeout(absl::Condition(&stopping_), rest);
  }
}

}  // namespace crumb
