// SPDX-License-Identifier: Apache-2.0
//
// A chunk of copies in a GPU's memory, mapped for reading: its table of headers in this process,
// its images on the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "client/transport/chunk_cache.h"
#include "client/transport/memory_socket_client.h"
#include "client/transport/sealed_mapping.h"
#include "crumb/cuda/shared_memory.h"
#include "proto/page/chunk_layout.h"
#include "proto/page/page_header.h"

namespace crumb {

// Thread-safe. `block` < num_blocks() throughout. Destroy it only when no kernel that reads it is
// under way.
class GpuChunk {
 public:
  // FAILED_PRECONDITION: smaller than its layout, or not what its name says; names the chunk.
  // Errors of SharedGpuMemory::Open. shared: by all prefixes that lie in the chunk.
  static absl::StatusOr<std::shared_ptr<GpuChunk>> Map(ChunkId id,
                                                       PageEncoding encoding,
                                                       const Geometry& geometry,
                                                       int device,
                                                       const MemorySocketClient::Chunk& chunk);

  PageEncoding encoding() const { return encoding_; }
  uint32_t num_blocks() const { return layout_.num_blocks; }
  // Acquire, as MappedChunk's.
  Generation LoadGeneration(uint32_t block) const;
  const PageHeader& header(uint32_t block) const {
    return *reinterpret_cast<const PageHeader*>(headers_.data() +
                                                ChunkLayout::header_offset(block));
  }
  // On the device.
  const std::byte* image(uint32_t block) const {
    return memory_->data() + block * layout_.block_stride();
  }

 private:
  GpuChunk(PageEncoding encoding,
           const ChunkLayout& layout,
           SealedMapping headers,
           std::unique_ptr<SharedGpuMemory> memory);

  const PageEncoding encoding_;
  const ChunkLayout layout_;
  const SealedMapping headers_;
  const std::unique_ptr<SharedGpuMemory> memory_;
};

// Those of one session. Thread-safe.
class GpuChunkMap {
 public:
  using Chunk = GpuChunk;

  // `device` < 0: there is none, and Get is not called. `socket` and `clock` outlive this.
  GpuChunkMap(const Geometry& geometry, int device, MemorySocketClient* socket, const Clock& clock)
      : geometry_(geometry), device_(device), socket_(socket), cache_(clock) {}

  // Errors of the socket and of GpuChunk::Map.
  absl::StatusOr<std::shared_ptr<GpuChunk>> Get(ChunkId id,
                                                PageEncoding encoding,
                                                absl::Time deadline);
  void DropIdle(const absl::flat_hash_set<ChunkId>& kept) { cache_.DropIdle(kept); }
  size_t num_mapped() const { return cache_.size(); }
  int device() const { return device_; }

 private:
  const Geometry geometry_;
  const int device_;
  MemorySocketClient* const socket_;
  ChunkCache<GpuChunk> cache_;
};

}  // namespace crumb
