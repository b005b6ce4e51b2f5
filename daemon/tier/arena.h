// SPDX-License-Identifier: Apache-2.0
//
// All chunks of the host tier, within one bound of bytes. A chunk belongs to one namespace and one
// encoding for as long as it lives; when its last block is given back it is to be closed or, where
// its namespace wants one at that moment, put back. The id of a closed one is never used again.
//
// Why blocks are not lent from one namespace to another: what a tenant has mapped must never show
// another's bytes. Why chunks are not all of one size: a small tenant would take a whole one.
//
// Thread-compatible (the store's mutex).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"

#include "daemon/tier/chunk.h"
#include "proto/base/ids.h"

namespace crumb {

class Arena {
 public:
  explicit Arena(size_t capacity_bytes) : capacity_bytes_(capacity_bytes) {}

  // RESOURCE_EXHAUSTED beyond the capacity, and as Chunk::Create. The chunk is the arena's.
  absl::StatusOr<Chunk*> Add(const ChunkSpec& spec);
  // An empty chunk leaves the arena. Destroy it where no lock is held: see chunk.h.
  std::unique_ptr<Chunk> Remove(ChunkId id);
  // It comes back, for the namespace and encoding that it is of, and there must be room for it.
  Chunk* PutBack(std::unique_ptr<Chunk> chunk);
  // Null: no such chunk (any more).
  Chunk* Find(ChunkId id) const;

  size_t capacity_bytes() const { return capacity_bytes_; }
  size_t chunk_bytes() const { return chunk_bytes_; }  // Of all chunks.
  size_t free_bytes() const { return capacity_bytes_ - chunk_bytes_; }
  size_t num_chunks() const { return chunks_.size(); }
  template <typename Visitor>
  void VisitChunks(Visitor visitor) const {
    for (const auto& [id, chunk] : chunks_) {
      visitor(*chunk);
    }
  }

 private:
  const size_t capacity_bytes_;
  size_t chunk_bytes_ = 0;
  uint32_t last_id_ = 0;
  absl::flat_hash_map<ChunkId, std::unique_ptr<Chunk>> chunks_;
};

}  // namespace crumb
