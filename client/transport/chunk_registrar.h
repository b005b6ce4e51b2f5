// SPDX-License-Identifier: Apache-2.0
//
// The thread that has an engine's GPU read mapped chunks by itself before anybody needs it: an
// upload that finds a chunk registered need not wait 2 ms for it. It only does early what
// MappedSource::RegisterWithGpu does in time; nothing waits for it.
//
// CUDA keeps the process's launches waiting while it registers, so the thread does that a tenth of
// the time, a chunk at a time: 2 GiB in about a second.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

#include "client/transport/mapped_chunk.h"
#include "proto/base/clock.h"

namespace crumb {

// Thread-safe.
class ChunkRegistrar {
 public:
  using Register = std::function<absl::Status(MappedChunk&)>;

  // By MappedChunk::RegisterWithGpu of device `gpu`. `clock` outlives this.
  ChunkRegistrar(int gpu, const Clock& clock);
  // `registers` is called on the thread; for tests.
  ChunkRegistrar(Register registers, const Clock& clock);
  // Waits for the chunk that is being registered.
  ~ChunkRegistrar();
  ChunkRegistrar(const ChunkRegistrar&) = delete;
  ChunkRegistrar& operator=(const ChunkRegistrar&) = delete;

  // Registers these, in this order, in place of what has not been begun; those that are registered
  // cost nothing. After a first error no more are: that error is for an upload to report.
  void SetChunks(const std::vector<std::shared_ptr<MappedChunk>>& chunks);

 private:
  void Run();
  // The next chunk; null: it is over.
  std::shared_ptr<MappedChunk> Next();  // shared: see pending_.

  const Register registers_;
  const Clock& clock_;

  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;  // Or failed.
  // shared: with the cache; a chunk that waits here stays mapped.
  std::deque<std::shared_ptr<MappedChunk>> pending_ ABSL_GUARDED_BY(mutex_);

  std::thread thread_;
};

}  // namespace crumb
