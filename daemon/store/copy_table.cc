// SPDX-License-Identifier: Apache-2.0
#include "daemon/store/copy_table.h"

#include <limits>

#include "proto/base/check.h"

namespace crumb::store_internal {

CopyTable::CopyTable(const CopyTier* tier) : tier_(tier) {
  if (tier != nullptr) {
    // Lowest first.
    for (uint32_t segment = tier->num_segments(); segment-- > 0;) {
      free_segments_.push_back(segment);
    }
  }
}

size_t CopyTable::capacity_bytes() const {
  return tier_ == nullptr ? 0 : tier_->num_segments() * tier_->segment_bytes();
}

size_t CopyTable::chunk_bytes() const {
  return tier_ == nullptr ? 0 : chunks_.size() * tier_->segment_bytes();
}

size_t CopyTable::num_unready_segments() const {
  return tier_ == nullptr ? 0 : tier_->num_segments() - free_segments_.size() - chunks_.size();
}

Chunk* CopyTable::Find(ChunkId id) const {
  const auto place = chunks_.find(id);
  return place == chunks_.end() ? nullptr : place->second.get();
}

Chunk* CopyTable::AddChunk(const Chunk& home) {
  const size_t stride = home.spec().layout.block_stride();
  if (free_segments_.empty() || tier_->segment_bytes() < stride ||
      last_id_ == std::numeric_limits<uint32_t>::max()) {
    return nullptr;
  }
  ChunkSpec spec = home.spec();
  spec.layout.num_blocks = static_cast<uint32_t>(tier_->segment_bytes() / stride);
  spec.segment = free_segments_.back();
  auto chunk = Chunk::Create(ChunkId(last_id_ + 1), spec);
  if (!chunk.ok()) {
    return nullptr;  // Out of descriptors: there will be no copy.
  }
  ++last_id_;
  free_segments_.pop_back();
  Chunk* const raw = chunk->get();
  with_free_[KindOf(*raw)].insert(raw->id());
  chunks_.emplace(raw->id(), *std::move(chunk));
  return raw;
}

bool CopyTable::Take(const Chunk& home, BlockCopy* copy) {
  CRUMB_CHECK(tier_ != nullptr && copy->chunk == nullptr, "a copy for a block without one");
  const auto place = with_free_.find(KindOf(home));
  Chunk* const chunk =
      place != with_free_.end() ? chunks_.at(*place->second.begin()).get() : AddChunk(home);
  if (chunk == nullptr) {
    return false;
  }
  *copy = {.chunk = chunk, .index = chunk->Take(), .generation = {}};
  copy->generation = chunk->generation(copy->index);
  if (chunk->num_free() == 0) {
    const auto full = with_free_.find(KindOf(*chunk));
    full->second.erase(chunk->id());
    if (full->second.empty()) {
      with_free_.erase(full);
    }
  }
  used_bytes_ += chunk->spec().layout.block_stride();
  ++num_copies_;
  return true;
}

void CopyTable::Free(BlockCopy* copy) {
  CRUMB_CHECK(copy->chunk != nullptr && copy->writing == 0, "a copy that is being written stays");
  Chunk* const chunk = copy->chunk;
  chunk->GiveBack(copy->index);
  used_bytes_ -= chunk->spec().layout.block_stride();
  --num_copies_;
  *copy = {};
  if (chunk->num_used() > 0) {
    with_free_[KindOf(*chunk)].insert(chunk->id());
    return;
  }
  if (const auto place = with_free_.find(KindOf(*chunk)); place != with_free_.end()) {
    place->second.erase(chunk->id());
    if (place->second.empty()) {
      with_free_.erase(place);
    }
  }
  spent_.push_back(*chunk->spec().segment);
  auto handle = chunks_.extract(chunk->id());
  closed_.push_back(std::move(handle.mapped()));
}

}  // namespace crumb::store_internal
