// SPDX-License-Identifier: Apache-2.0
#include "daemon/tier/arena.h"

#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "proto/base/check.h"
#include "proto/base/status_macros.h"

namespace crumb {

absl::StatusOr<Chunk*> Arena::Add(const ChunkSpec& spec) {
  if (spec.layout.total_bytes() > free_bytes()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("chunk of ", spec.layout.total_bytes(), " bytes: ", chunk_bytes_, " of ",
                     capacity_bytes_, " are in other chunks; raise [store] capacity"));
  }
  if (last_id_ == std::numeric_limits<uint32_t>::max()) {
    return absl::ResourceExhaustedError(
        "4,294,967,295 chunks were made since the daemon started; restart it");
  }
  CRUMB_ASSIGN_OR_RETURN(auto chunk, Chunk::Create(ChunkId(last_id_ + 1), spec));
  ++last_id_;
  chunk_bytes_ += chunk->bytes();
  Chunk* raw = chunk.get();
  chunks_.emplace(raw->id(), std::move(chunk));
  return raw;
}

std::unique_ptr<Chunk> Arena::Remove(ChunkId id) {
  auto handle = chunks_.extract(id);
  CRUMB_CHECK(!handle.empty(), "chunk that is not there");
  std::unique_ptr<Chunk> chunk = std::move(handle.mapped());
  CRUMB_CHECK(chunk->num_used() == 0, "chunk in use");
  chunk_bytes_ -= chunk->bytes();
  return chunk;
}

Chunk* Arena::PutBack(std::unique_ptr<Chunk> chunk) {
  CRUMB_CHECK(chunk->num_used() == 0, "chunk in use");
  CRUMB_CHECK(chunk->bytes() <= free_bytes(), "room for a chunk that comes back");
  chunk_bytes_ += chunk->bytes();
  Chunk* raw = chunk.get();
  CRUMB_CHECK(chunks_.emplace(raw->id(), std::move(chunk)).second, "chunk that is there already");
  return raw;
}

Chunk* Arena::Find(ChunkId id) const {
  const auto place = chunks_.find(id);
  return place == chunks_.end() ? nullptr : place->second.get();
}

}  // namespace crumb
