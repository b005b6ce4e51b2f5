// SPDX-License-Identifier: Apache-2.0
//
// Chunks that this process has mapped: one mapping a chunk, shared by all prefixes that lie in it,
// made at its first use or ahead of it, and dropped when it has been idle and the daemon has it no
// more.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "proto/base/clock.h"
#include "proto/base/ids.h"
#include "proto/base/status_macros.h"

namespace crumb {

// Thread-safe.
template <typename Chunk>
class ChunkCache {
 public:
  // An idle mapping keeps memory alive that the daemon may have given up; a mapping that is missing
  // costs a lookup 0.1 ms.
  static constexpr absl::Duration kMaxIdle = absl::Seconds(30);

  // `clock` outlives this.
  explicit ChunkCache(const Clock& clock) : clock_(clock) {}

  // The mapping, made by `load` if need be: absl::StatusOr<std::shared_ptr<Chunk>>(). Its errors.
  // shared: by all prefixes that lie in the chunk.
  template <typename Load>
  absl::StatusOr<std::shared_ptr<Chunk>> Get(ChunkId id, const Load& load) {
    const absl::Time now = clock_.Now();
    {
      absl::MutexLock lock(&mutex_);
      if (const auto found = chunks_.find(id); found != chunks_.end()) {
        found->second.last_used = now;
        return found->second.chunk;
      }
    }
    CRUMB_ASSIGN_OR_RETURN(std::shared_ptr<Chunk> chunk, load());
    absl::MutexLock lock(&mutex_);
    // Another thread may have been faster; its mapping is as good, and ours goes.
    return chunks_.try_emplace(id, Entry{std::move(chunk), now}).first->second.chunk;
  }

  // Unmaps what no prefix has used for kMaxIdle; but what the daemon still has, `kept`, never.
  void DropIdle(const absl::flat_hash_set<ChunkId>& kept = {}) {
    const absl::Time now = clock_.Now();
    std::vector<std::shared_ptr<Chunk>> dropped;  // Unmapped without the lock.
    absl::MutexLock lock(&mutex_);
    for (auto entry = chunks_.begin(); entry != chunks_.end();) {
      const auto current = entry++;
      if (current->second.chunk.use_count() > 1 || kept.contains(current->first)) {
        current->second.last_used = now;
      } else if (now - current->second.last_used >= kMaxIdle) {
        dropped.push_back(std::move(current->second.chunk));
        chunks_.erase(current);
      }
    }
  }

  size_t size() const {
    absl::MutexLock lock(&mutex_);
    return chunks_.size();
  }

 private:
  struct Entry {
    std::shared_ptr<Chunk> chunk;
    absl::Time last_used;
  };

  const Clock& clock_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<ChunkId, Entry> chunks_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb
