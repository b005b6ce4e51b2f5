// SPDX-License-Identifier: Apache-2.0
//
// The blocks of all pages: which chunk each lies in, which heads of it are readable, who writes and
// who holds it. Sits on the arena; decides about sizes of chunks, and nothing about pages.
//
// State of one KV head of a block:   free -> claimed (an unfinished publish writes it) -> present
// and back to free when the publish is aborted. A head is never both claimed and present. Engine
// ranks that hold different heads of one model fill the same block, each its own heads.
//
// A page may have several blocks of one encoding: two engines that publish the same heads of the
// same page at once write to one block each, and the first to commit wins. A reader is given one
// block that has all heads it asks for.
//
// Thread-compatible (the store's mutex).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/status.h"

#include "daemon/store/copy_table.h"
#include "daemon/tier/arena.h"
#include "proto/base/ids.h"
#include "proto/page/geometry.h"

namespace crumb {

class PrefixNode;

namespace store_internal {

// Names a StoredBlock; what the index keeps as a page's handle. 0: none.
using BlockSlot = uint32_t;

struct StoredBlock {
  Chunk* chunk = nullptr;  // Null: the slot is unused.
  uint32_t index = 0;      // In the chunk.
  BlockSlot next = 0;      // The page's next block of the same encoding, younger.
  Generation generation;   // Even once a head is present.
  uint64_t heads_present = 0;
  uint64_t heads_claimed = 0;
  PageIdx page;
  uint32_t holds = 0;          // Of leases on BF16 copies, of reads and writes in flight.
  PrefixNode* node = nullptr;  // Where the page is that it belongs to. Null: detached; it is freed
                               // when nobody holds it any more.
  int64_t last_use = 0;        // Of BF16 copies, whose recency is not their page's.
  BlockCopy copy = {};         // In the tier beside; dropped with the block at the latest.

  PageEncoding encoding() const { return chunk->spec().encoding; }
  bool IsIdle() const { return holds == 0 && heads_claimed == 0; }
};

constexpr size_t EncodingIndex(PageEncoding encoding) {
  return encoding == PageEncoding::kInt2 ? 0 : 1;
}
// A number for each encoding: [EncodingIndex].
using PerEncoding = std::array<uint32_t, 2>;

// The chunks of one namespace, by encoding.
struct BlockPool {
  NamespaceId namespace_id;
  ProfileId profile_id;
  Geometry geometry;
  struct Chunks {
    absl::btree_map<ChunkId, Chunk*> with_free;  // Oldest first.
    uint32_t num_chunks = 0;
    uint32_t num_blocks = 0;
    uint32_t num_free = 0;
  };
  std::array<Chunks, 2> chunks;  // [EncodingIndex]

  bool empty() const { return chunks[0].num_chunks + chunks[1].num_chunks == 0; }
};

class BlockTable {
 public:
  BlockTable(size_t capacity_bytes, size_t chunk_bytes);

  StoredBlock& operator[](BlockSlot slot) { return blocks_[slot]; }
  const StoredBlock& operator[](BlockSlot slot) const { return blocks_[slot]; }

  // The least that chunks for so many more blocks of a geometry take.
  size_t MinimumBytes(const Geometry& geometry, const PerEncoding& blocks) const;
  // Makes chunks so that the pool has at least so many free blocks. RESOURCE_EXHAUSTED as Arena;
  // the pool is then as before.
  absl::Status Reserve(BlockPool* pool, const PerEncoding& blocks);
  // A free block of the pool, which must have one.
  BlockSlot Take(BlockPool* pool, PageEncoding encoding, PageIdx page);
  // The block must be idle and detached. Its chunk is closed when this was its last block.
  void Free(BlockPool* pool, BlockSlot slot);

  // Heads of a block become readable; see Chunk::Settle and Chunk::AddHeads.
  void MakePresent(BlockSlot slot,
                   uint64_t heads,
                   std::span<const uint32_t, Geometry::kMaxKvHeads> head_crc32c);

  // Chunks that were closed: to be destroyed where no lock is held, at the end of each operation.
  // Until then Reserve may take them back, since their memory need not be touched anew.
  std::vector<std::unique_ptr<Chunk>> TakeClosed() { return std::move(closed_); }

  // From now on, memory of new chunks is told by TakeNewChunk: the newest first, null: of none. The
  // latest kMaxNewChunks of those that still live.
  void TellNewChunks() { tells_new_chunks_ = true; }
  std::shared_ptr<ChunkMemory> TakeNewChunk();  // shared: with its chunk.
  bool has_new_chunks() const { return !new_chunks_.empty(); }

  const Arena& arena() const { return arena_; }
  size_t used_bytes() const { return used_bytes_; }              // Of all blocks.
  size_t unfinished_bytes() const { return unfinished_bytes_; }  // Of those with no head present.
  size_t num_slots() const { return blocks_.size(); }

 private:
  uint32_t MaxBlocks(const Geometry& geometry, PageEncoding encoding) const;
  // Of a new chunk, at most as many as one may have.
  uint32_t ChunkBlocks(const BlockPool& pool,
                       PageEncoding encoding,
                       const PerEncoding& missing) const;
  absl::Status AddChunk(BlockPool* pool, PageEncoding encoding, uint32_t num_blocks);
  void Own(BlockPool* pool, Chunk* chunk);
  // A chunk of the pool that was closed in this same operation, if it has no more than `max_blocks`
  // and leaves room for the rest of what is missing. Returns its number of blocks; 0: there is
  // none.
  uint32_t TakeBackClosed(BlockPool* pool,
                          PageEncoding encoding,
                          uint32_t max_blocks,
                          const PerEncoding& missing);
  void CloseIfEmpty(BlockPool* pool, Chunk* chunk);

  Arena arena_;
  const size_t chunk_bytes_target_;
  std::deque<StoredBlock> blocks_;  // [slot]; stable addresses. Slot 0 is never used.
  std::vector<BlockSlot> unused_;
  std::vector<std::unique_ptr<Chunk>> closed_;
  static constexpr size_t kMaxNewChunks = 1024;
  bool tells_new_chunks_ = false;
  std::deque<std::weak_ptr<ChunkMemory>> new_chunks_;
  size_t used_bytes_ = 0;
  size_t unfinished_bytes_ = 0;
};

}  // namespace store_internal
}  // namespace crumb
