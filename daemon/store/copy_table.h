// SPDX-License-Identifier: Apache-2.0
//
// Places of copies in a tier beside the host arena (daemon/tier/copy_tier.h): which block of which
// chunk of copies each has. Decides about chunks and segments, and nothing about pages.
//
// A segment is free, the memory of one chunk of copies, or spent: its chunk had its last copy
// dropped, and it waits to be renewed, since other tenants must not see what is left in it, nor
// those who still have it mapped see what comes next.
//
// Thread-compatible (the store's mutex).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"

#include "daemon/tier/chunk.h"
#include "daemon/tier/copy_tier.h"
#include "proto/base/ids.h"

namespace crumb::store_internal {

// A block's copy, as its StoredBlock keeps it.
struct BlockCopy {
  Chunk* chunk = nullptr;  // Null: there is none.
  uint32_t index = 0;      // In the chunk.
  Generation generation;   // Even once a head is readable.
  uint64_t heads = 0;      // Readable.
  uint64_t writing = 0;    // On their way, or waiting for their publish's commit. Never both.
};

class CopyTable {
 public:
  // No tier: there are no copies.
  explicit CopyTable(const CopyTier* tier);

  bool has_tier() const { return tier_ != nullptr; }
  const CopyTier& tier() const { return *tier_; }

  // A place for the copy of a block of this chunk, of which there must be none. False: no block of
  // its namespace and encoding is free, and no segment.
  bool Take(const Chunk& home, BlockCopy* copy);
  // The copy must not be being written.
  void Free(BlockCopy* copy);

  // Null: no such chunk (any more).
  Chunk* Find(ChunkId id) const;
  size_t image_offset(const BlockCopy& copy) const {
    return copy.index * copy.chunk->spec().layout.block_stride();
  }

  // Segments to be renewed, and back when they are. Spent ones are told once.
  std::vector<uint32_t> TakeSpent() { return std::exchange(spent_, {}); }
  bool has_spent() const { return !spent_.empty(); }
  void ReturnSegment(uint32_t segment) { free_segments_.push_back(segment); }
  // Neither free nor of a chunk: spent, or being renewed.
  size_t num_unready_segments() const;

  // Chunks that were closed: to be destroyed where no lock is held.
  std::vector<std::unique_ptr<Chunk>> TakeClosed() { return std::move(closed_); }

  size_t capacity_bytes() const;
  size_t chunk_bytes() const;  // Of segments that chunks have.
  size_t used_bytes() const { return used_bytes_; }
  size_t num_copies() const { return num_copies_; }
  size_t num_chunks() const { return chunks_.size(); }
  template <typename Visitor>
  void VisitChunks(Visitor visitor) const {
    for (const auto& [id, chunk] : chunks_) {
      visitor(*chunk);
    }
  }

 private:
  using Kind = std::pair<NamespaceId, PageEncoding>;
  static Kind KindOf(const Chunk& chunk) {
    return {chunk.spec().namespace_id, chunk.spec().encoding};
  }
  Chunk* AddChunk(const Chunk& home);

  const CopyTier* const tier_;
  std::vector<uint32_t> free_segments_;
  std::vector<uint32_t> spent_;
  uint32_t last_id_ = 0;
  absl::flat_hash_map<ChunkId, std::unique_ptr<Chunk>> chunks_;
  absl::flat_hash_map<Kind, absl::btree_set<ChunkId>> with_free_;  // Oldest first; none is empty.
  std::vector<std::unique_ptr<Chunk>> closed_;
  size_t used_bytes_ = 0;
  size_t num_copies_ = 0;
};

}  // namespace crumb::store_internal
