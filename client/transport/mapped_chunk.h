// SPDX-License-Identifier: Apache-2.0
//
// Chunks of the daemon's arena, mapped read-only into this process: one mapping a chunk, shared by
// all prefixes that lie in it (chunk_cache.h).
//
// The daemon may reuse a block while it is mapped here: then its generation moves, and who read it
// finds out by comparing (chunk_layout.h).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "client/transport/chunk_cache.h"
#include "client/transport/memory_socket_client.h"
#include "client/transport/sealed_mapping.h"
#include "crumb/cuda/transfer.h"
#include "proto/base/clock.h"
#include "proto/base/ids.h"
#include "proto/page/chunk_layout.h"
#include "proto/page/page_header.h"

namespace crumb {

// Thread-safe. `block` < num_blocks() throughout.
class MappedChunk {
 public:
  // FAILED_PRECONDITION: smaller than its layout, or not sealed against shrinking, which would let
  // a read fault. Both name the chunk.
  static absl::StatusOr<std::shared_ptr<MappedChunk>> Map(ChunkId id,
                                                          PageEncoding encoding,
                                                          const Geometry& geometry,
                                                          const MemorySocketClient::Chunk& chunk);

  PageEncoding encoding() const { return encoding_; }
  uint32_t num_blocks() const { return layout_.num_blocks; }

  // Acquire: what is read of the block after it belongs to this generation, unless a later call
  // returns another.
  Generation LoadGeneration(uint32_t block) const;
  const PageHeader& header(uint32_t block) const {
    return *reinterpret_cast<const PageHeader*>(mapping_.data() +
                                                ChunkLayout::header_offset(block));
  }
  std::span<const std::byte> image(uint32_t block) const {
    return {mapping_.data() + layout_.block_offset(block), layout_.image_bytes};
  }

  // Enters a block's pages into this process's page tables in one call; one by one, as they are
  // touched, costs ten times as much.
  void Populate(uint32_t block) const;

  // Has the current GPU read the whole mapping by itself, from now until it is unmapped: at the
  // first call, which takes some 60 ms a GiB; no-op later. As HostRegistration::Create.
  absl::Status RegisterWithGpu() ABSL_LOCKS_EXCLUDED(mutex_);

  // Whether a block's bytes were found right in this generation, for this process's heads.
  bool IsVerified(uint32_t block, Generation generation) const {
    return verified_[block].load(std::memory_order_relaxed) == generation.value();
  }
  void SetVerified(uint32_t block, Generation generation) {
    verified_[block].store(generation.value(), std::memory_order_relaxed);
  }

 private:
  MappedChunk(PageEncoding encoding, const ChunkLayout& layout, SealedMapping mapping);

  const PageEncoding encoding_;
  const ChunkLayout layout_;
  const SealedMapping mapping_;
  // Generations; 0 is none, since a block's first is 2. Relaxed: they guard no other memory.
  const std::unique_ptr<std::atomic<uint64_t>[]> verified_;

  absl::Mutex mutex_;
  std::unique_ptr<HostRegistration> registration_ ABSL_GUARDED_BY(mutex_);  // Before the mapping.
};

// The chunks of one session. Thread-safe.
class ChunkMap {
 public:
  using Chunk = MappedChunk;

  // `socket` and `clock` outlive this.
  ChunkMap(const Geometry& geometry, MemorySocketClient* socket, const Clock& clock)
      : geometry_(geometry), socket_(socket), cache_(clock) {}

  // The mapping, made if need be. Errors of the socket and of MappedChunk::Map.
  // shared: by all prefixes that lie in the chunk.
  absl::StatusOr<std::shared_ptr<MappedChunk>> Get(ChunkId id,
                                                   PageEncoding encoding,
                                                   absl::Time deadline);
  void DropIdle(const absl::flat_hash_set<ChunkId>& kept) { cache_.DropIdle(kept); }
  size_t num_mapped() const { return cache_.size(); }

 private:
  const Geometry geometry_;
  MemorySocketClient* const socket_;
  ChunkCache<MappedChunk> cache_;
};

}  // namespace crumb
