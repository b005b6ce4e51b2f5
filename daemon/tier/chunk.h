// SPDX-License-Identifier: Apache-2.0
//
// One memfd of the arena: a header table and blocks, as proto/page/chunk_layout.h lays them out. A
// chunk of copies has the table alone: its blocks lie in a segment of their tier (copy_tier.h).
// The daemon has the only writable mapping. Seals keep everyone else, whatever rights they have,
// from mapping it writable, writing to it or changing its size (F_SEAL_FUTURE_WRITE, SHRINK, GROW),
// and from changing the seals (F_SEAL_SEAL).
//
// Memory comes from the system page by page at the first write, so making a chunk takes
// microseconds and can be done under a lock; giving a used one back takes milliseconds, and must
// not. The size of a chunk is therefore a bound, and the arena counts all of it.
//
// Free-block bookkeeping is Thread-compatible (the store's mutex). The header table is read by
// other processes at any time: each change goes through atomics in the order that chunk_layout.h
// states. The bytes of a block belong to whoever the store gave them to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"

#include "daemon/tier/chunk_memory.h"
#include "daemon/tier/populate.h"
#include "proto/base/ids.h"
#include "proto/base/unique_fd.h"
#include "proto/page/chunk_layout.h"
#include "proto/page/geometry.h"
#include "proto/page/page_header.h"

namespace crumb {

// What all blocks of one chunk have in common.
struct ChunkSpec {
  NamespaceId namespace_id;
  ProfileId profile_id;
  PageEncoding encoding = PageEncoding::kInt2;
  ChunkLayout layout;
  // Of a tier: block b lies in it at b * layout.block_stride(), and the memfd holds no images.
  std::optional<uint32_t> segment = std::nullopt;
};

class Chunk {
 public:
  // RESOURCE_EXHAUSTED when the system gives no memory, descriptor or address space; the message
  // has the size and the limit to raise.
  static absl::StatusOr<std::unique_ptr<Chunk>> Create(ChunkId id, const ChunkSpec& spec);
  // Unmaps and closes, unless its memory is being prepared. Whoever still has it mapped keeps the
  // memory alive until they unmap it.
  ~Chunk() = default;
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  ChunkId id() const { return id_; }
  const ChunkSpec& spec() const { return spec_; }
  // Of the memfd.
  size_t bytes() const { return MemfdBytes(spec_); }
  uint32_t num_blocks() const { return spec_.layout.num_blocks; }
  uint32_t num_free() const { return static_cast<uint32_t>(free_.size()); }
  uint32_t num_used() const { return num_blocks() - num_free(); }
  // shared: with who prepares it.
  const std::shared_ptr<ChunkMemory>& memory() const { return memory_; }
  // Another descriptor of the same memfd, the caller's own.
  absl::StatusOr<UniqueFd> Duplicate() const;

  // Takes a free block, lowest first so that a prefix lies in one run; there must be one. Its
  // generation is odd from here until Settle.
  uint32_t Take();
  // The generation moves on, so that no reader believes what it reads there from now on.
  void GiveBack(uint32_t block);

  // The whole image of a block; not of a chunk of copies.
  std::span<std::byte> Image(uint32_t block);
  // Where byte `offset` of its image is, if nothing has been written there since the chunk was
  // made.
  FreshMemory Fresh(uint32_t block, size_t offset) const;
  // A copy; consistent while no one calls Settle or AddHeads for this block.
  PageHeader Header(uint32_t block) const;
  Generation generation(uint32_t block) const { return Generation(generations_[block]); }

  // The first heads of a block are in place: writes its header and makes the generation even, in an
  // order that a reader who sees that generation sees all of the rest. `head_crc32c` has the
  // checksums of the heads in `heads`, by head.
  void Settle(uint32_t block,
              PageIdx page,
              uint64_t heads,
              std::span<const uint32_t, Geometry::kMaxKvHeads> head_crc32c);
  // Further heads of a settled block are in place. The generation stays: nothing that could be read
  // has changed.
  void AddHeads(uint32_t block,
                uint64_t heads,
                std::span<const uint32_t, Geometry::kMaxKvHeads> head_crc32c);

 private:
  Chunk(ChunkId id, const ChunkSpec& spec, std::shared_ptr<ChunkMemory> memory);
  static size_t MemfdBytes(const ChunkSpec& spec);
  std::byte* base() const { return memory_->bytes().data(); }
  PageHeader& header(uint32_t block);
  void MoveGeneration(uint32_t block);
  void StoreHeads(PageHeader* target,
                  uint64_t heads,
                  std::span<const uint32_t, Geometry::kMaxKvHeads> head_crc32c);

  const ChunkId id_;
  const ChunkSpec spec_;
  const std::shared_ptr<ChunkMemory> memory_;
  std::vector<uint32_t> free_;         // Stack: the lowest is last.
  std::vector<uint64_t> generations_;  // The truth; the table in shared memory is a copy.
};

}  // namespace crumb
