// SPDX-License-Identifier: Apache-2.0
#include "client/transport/mapped_chunk.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "proto/base/huge_page.h"
#include "proto/base/status_macros.h"

namespace crumb {

MappedChunk::MappedChunk(PageEncoding encoding, const ChunkLayout& layout, const std::byte* base)
    : encoding_(encoding),
      layout_(layout),
      base_(base),
      verified_(std::make_unique<std::atomic<uint64_t>[]>(layout.num_blocks)) {}

MappedChunk::~MappedChunk() {
  ::munmap(const_cast<std::byte*>(base_), layout_.total_bytes());
}

// shared: by all prefixes that lie in the chunk.
absl::StatusOr<std::shared_ptr<MappedChunk>> MappedChunk::Map(
    ChunkId id,
    PageEncoding encoding,
    const Geometry& geometry,
    const MemorySocketClient::Chunk& chunk) {
  const ChunkLayout layout{.image_bytes = geometry.PageBytes(encoding),
                           .num_blocks = static_cast<uint32_t>(chunk.num_blocks)};
  if (chunk.num_blocks == 0 || chunk.num_blocks > (1u << 20) ||
      layout.total_bytes() > chunk.bytes) {
    return absl::FailedPreconditionError(
        absl::StrCat("chunk ", id.value(), " has ", chunk.bytes, " bytes for ", chunk.num_blocks,
                     " pages of ", layout.image_bytes,
                     " bytes, which do not fit; use the library and the daemon of one release"));
  }
  const int seals = ::fcntl(chunk.memfd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("chunk ", id.value(),
                     " is not sealed against shrinking, so reading it could fault; is another "
                     "program serving the memory socket?"));
  }
  void* base = MapAtHugePage(chunk.memfd.get(), layout.total_bytes(), PROT_READ);
  if (base == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("chunk ", id.value(), ": cannot map ", layout.total_bytes(), " bytes: ",
                     std::strerror(errno)));  // NOLINT(concurrency-mt-unsafe)
  }
  return std::shared_ptr<MappedChunk>(
      new MappedChunk(encoding, layout, static_cast<const std::byte*>(base)));
}

Generation MappedChunk::LoadGeneration(uint32_t block) const {
  // Pairs with the daemon's release store after it settled the block's bytes.
  return Generation(__atomic_load_n(&header(block).generation, __ATOMIC_ACQUIRE));
}

void MappedChunk::Populate(uint32_t block) const {
  // A hint: where the kernel lacks it (before 5.14), the first touch does it.
  ::madvise(const_cast<std::byte*>(image(block).data()), layout_.block_stride(),
            MADV_POPULATE_READ);
}

absl::StatusOr<std::shared_ptr<MappedChunk>> ChunkMap::Get(ChunkId id,
                                                           PageEncoding encoding,
                                                           absl::Time deadline) {
  const absl::Time now = clock_.Now();
  {
    absl::MutexLock lock(&mutex_);
    if (const auto found = chunks_.find(id); found != chunks_.end()) {
      found->second.last_used = now;
      return found->second.chunk;
    }
  }
  CRUMB_ASSIGN_OR_RETURN(const MemorySocketClient::Chunk memory, socket_->GetChunk(id, deadline));
  CRUMB_ASSIGN_OR_RETURN(std::shared_ptr<MappedChunk> chunk,
                         MappedChunk::Map(id, encoding, geometry_, memory));
  absl::MutexLock lock(&mutex_);
  // Another thread may have been faster; its mapping is as good, and ours goes.
  return chunks_.try_emplace(id, Entry{std::move(chunk), now}).first->second.chunk;
}

void ChunkMap::DropIdle() {
  const absl::Time now = clock_.Now();
  std::vector<std::shared_ptr<MappedChunk>> dropped;  // Unmapped without the lock.
  absl::MutexLock lock(&mutex_);
  for (auto entry = chunks_.begin(); entry != chunks_.end();) {
    const auto current = entry++;
    if (current->second.chunk.use_count() > 1) {
      current->second.last_used = now;
    } else if (now - current->second.last_used >= kMaxIdle) {
      dropped.push_back(std::move(current->second.chunk));
      chunks_.erase(current);
    }
  }
}

size_t ChunkMap::num_mapped() const {
  absl::MutexLock lock(&mutex_);
  return chunks_.size();
}

}  // namespace crumb
