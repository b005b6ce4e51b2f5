// SPDX-License-Identifier: Apache-2.0
#include "daemon/store/block_table.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "proto/base/check.h"
#include "proto/base/status_macros.h"

namespace crumb::store_internal {
namespace {

constexpr std::array kEncodings = {PageEncoding::kInt2, PageEncoding::kBf16};

size_t BlockBytes(const StoredBlock& block) {
  return block.chunk->spec().layout.block_stride();
}

}  // namespace

BlockTable::BlockTable(size_t capacity_bytes, size_t chunk_bytes)
    : arena_(capacity_bytes), chunk_bytes_target_(chunk_bytes), blocks_(1) {}

uint32_t BlockTable::MaxBlocks(const Geometry& geometry, PageEncoding encoding) const {
  return ChunkLayout::Fit(geometry, encoding, chunk_bytes_target_).num_blocks;
}

size_t BlockTable::MinimumBytes(const Geometry& geometry, const PerEncoding& blocks) const {
  size_t bytes = 0;
  for (const PageEncoding encoding : kEncodings) {
    const uint32_t needed = blocks[EncodingIndex(encoding)];
    const uint32_t max = MaxBlocks(geometry, encoding);
    const size_t image_bytes = geometry.PageBytes(encoding);
    bytes += needed / max * ChunkLayout{image_bytes, max}.total_bytes();
    if (needed % max != 0) {
      bytes += ChunkLayout{image_bytes, needed % max}.total_bytes();
    }
  }
  return bytes;
}

absl::Status BlockTable::AddChunk(BlockPool* pool, PageEncoding encoding, uint32_t num_blocks) {
  const ChunkSpec spec{.namespace_id = pool->namespace_id,
                       .profile_id = pool->profile_id,
                       .encoding = encoding,
                       .layout = {pool->geometry.PageBytes(encoding), num_blocks}};
  CRUMB_ASSIGN_OR_RETURN(Chunk* const chunk, arena_.Add(spec));
  Own(pool, chunk);
  if (tells_new_chunks_) {
    new_chunks_.push_back(chunk->memory());
    if (new_chunks_.size() > kMaxNewChunks) {
      new_chunks_.pop_front();
    }
  }
  return absl::OkStatus();
}

// shared: with its chunk.
std::shared_ptr<ChunkMemory> BlockTable::TakeNewChunk() {
  while (!new_chunks_.empty()) {
    std::shared_ptr<ChunkMemory> memory = new_chunks_.back().lock();
    new_chunks_.pop_back();
    if (memory != nullptr) {
      return memory;
    }
  }
  return nullptr;
}

void BlockTable::Own(BlockPool* pool, Chunk* chunk) {
  BlockPool::Chunks& chunks = pool->chunks[EncodingIndex(chunk->spec().encoding)];
  chunks.with_free.emplace(chunk->id(), chunk);
  ++chunks.num_chunks;
  chunks.num_blocks += chunk->num_blocks();
  chunks.num_free += chunk->num_blocks();
}

uint32_t BlockTable::TakeBackClosed(BlockPool* pool,
                                    PageEncoding encoding,
                                    uint32_t max_blocks,
                                    const PerEncoding& missing) {
  const auto fits = [&](const std::unique_ptr<Chunk>& chunk) {
    const ChunkSpec& spec = chunk->spec();
    if (spec.namespace_id != pool->namespace_id || spec.encoding != encoding ||
        chunk->num_blocks() > max_blocks) {
      return false;
    }
    PerEncoding rest = missing;
    uint32_t& of_encoding = rest[EncodingIndex(encoding)];
    of_encoding -= std::min(of_encoding, chunk->num_blocks());
    return chunk->bytes() + MinimumBytes(pool->geometry, rest) <= arena_.free_bytes();
  };
  const auto found = std::find_if(closed_.begin(), closed_.end(), fits);
  if (found == closed_.end()) {
    return 0;
  }
  Chunk* const chunk = arena_.PutBack(std::move(*found));
  closed_.erase(found);
  Own(pool, chunk);
  return chunk->num_blocks();
}

uint32_t BlockTable::ChunkBlocks(const BlockPool& pool,
                                 PageEncoding encoding,
                                 const PerEncoding& missing) const {
  const size_t i = EncodingIndex(encoding);
  const uint32_t max = MaxBlocks(pool.geometry, encoding);
  const uint32_t needed = std::min(missing[i], max);
  // Room to grow, as much as the namespace has already, so that few chunks hold a namespace of
  // any size; none once half of the capacity is taken, where it would be at others' expense.
  const size_t keep_free =
      std::max(arena_.capacity_bytes() / 2, MinimumBytes(pool.geometry, missing));
  const uint32_t num_blocks = std::clamp(pool.chunks[i].num_blocks, needed, max);
  const ChunkLayout layout{pool.geometry.PageBytes(encoding), num_blocks};
  return layout.total_bytes() + keep_free > arena_.free_bytes() ? needed : num_blocks;
}

absl::Status BlockTable::Reserve(BlockPool* pool, const PerEncoding& blocks) {
  PerEncoding missing{};
  for (size_t i = 0; i < missing.size(); ++i) {
    missing[i] = blocks[i] - std::min(blocks[i], pool->chunks[i].num_free);
  }
  for (const PageEncoding encoding : kEncodings) {
    const size_t i = EncodingIndex(encoding);
    while (missing[i] > 0) {
      const uint32_t num_blocks = ChunkBlocks(*pool, encoding, missing);
      if (const uint32_t back = TakeBackClosed(pool, encoding, num_blocks, missing); back > 0) {
        missing[i] -= std::min(missing[i], back);
        continue;
      }
      if (absl::Status status = AddChunk(pool, encoding, num_blocks); !status.ok()) {
        for (BlockPool::Chunks& chunks : pool->chunks) {
          const auto with_free = chunks.with_free;
          for (const auto& [id, chunk] : with_free) {
            CloseIfEmpty(pool, chunk);
          }
        }
        return status;
      }
      missing[i] -= std::min(missing[i], num_blocks);
    }
  }
  return absl::OkStatus();
}

BlockSlot BlockTable::Take(BlockPool* pool, PageEncoding encoding, PageIdx page) {
  BlockPool::Chunks& chunks = pool->chunks[EncodingIndex(encoding)];
  CRUMB_CHECK(chunks.num_free > 0, "no block was reserved");
  Chunk* const chunk = chunks.with_free.begin()->second;
  BlockSlot slot;
  if (unused_.empty()) {
    slot = static_cast<BlockSlot>(blocks_.size());
    blocks_.emplace_back();
  } else {
    slot = unused_.back();
    unused_.pop_back();
  }
  StoredBlock& block = blocks_[slot];
  block = {.chunk = chunk, .index = chunk->Take(), .generation = {}, .page = page};
  block.generation = chunk->generation(block.index);
  --chunks.num_free;
  if (chunk->num_free() == 0) {
    chunks.with_free.erase(chunk->id());
  }
  used_bytes_ += BlockBytes(block);
  unfinished_bytes_ += BlockBytes(block);
  return slot;
}

void BlockTable::Free(BlockPool* pool, BlockSlot slot) {
  StoredBlock& block = blocks_[slot];
  CRUMB_CHECK(block.IsIdle() && block.node == nullptr, "a block in use must not be freed");
  Chunk* const chunk = block.chunk;
  used_bytes_ -= BlockBytes(block);
  if (block.heads_present == 0) {
    unfinished_bytes_ -= BlockBytes(block);
  }
  chunk->GiveBack(block.index);
  BlockPool::Chunks& chunks = pool->chunks[EncodingIndex(chunk->spec().encoding)];
  ++chunks.num_free;
  chunks.with_free.emplace(chunk->id(), chunk);
  block = {};
  unused_.push_back(slot);
  CloseIfEmpty(pool, chunk);
}

void BlockTable::CloseIfEmpty(BlockPool* pool, Chunk* chunk) {
  if (chunk->num_used() > 0) {
    return;
  }
  BlockPool::Chunks& chunks = pool->chunks[EncodingIndex(chunk->spec().encoding)];
  --chunks.num_chunks;
  chunks.num_blocks -= chunk->num_blocks();
  chunks.num_free -= chunk->num_blocks();
  chunks.with_free.erase(chunk->id());
  closed_.push_back(arena_.Remove(chunk->id()));
}

void BlockTable::MakePresent(BlockSlot slot,
                             uint64_t heads,
                             std::span<const uint32_t, Geometry::kMaxKvHeads> head_crc32c) {
  StoredBlock& block = blocks_[slot];
  CRUMB_CHECK((block.heads_claimed & heads) == heads, "heads that no one claimed");
  if (block.heads_present == 0) {
    unfinished_bytes_ -= BlockBytes(block);
    block.chunk->Settle(block.index, block.page, heads, head_crc32c);
    block.generation = block.chunk->generation(block.index);
  } else {
    block.chunk->AddHeads(block.index, heads, head_crc32c);
  }
  block.heads_claimed &= ~heads;
  block.heads_present |= heads;
}

}  // namespace crumb::store_internal
