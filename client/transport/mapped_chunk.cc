// SPDX-License-Identifier: Apache-2.0
#include "client/transport/mapped_chunk.h"

#include <sys/mman.h>

#include <utility>

#include "absl/strings/str_cat.h"

#include "proto/base/status_macros.h"

namespace crumb {

MappedChunk::MappedChunk(PageEncoding encoding, const ChunkLayout& layout, SealedMapping mapping)
    : encoding_(encoding),
      layout_(layout),
      mapping_(std::move(mapping)),
      verified_(std::make_unique<std::atomic<uint64_t>[]>(layout.num_blocks)) {}

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
  CRUMB_ASSIGN_OR_RETURN(SealedMapping mapping,
                         SealedMapping::Map(chunk.memfd.get(), layout.total_bytes(),
                                            absl::StrCat("chunk ", id.value())));
  return std::shared_ptr<MappedChunk>(new MappedChunk(encoding, layout, std::move(mapping)));
}

Generation MappedChunk::LoadGeneration(uint32_t block) const {
  // Pairs with the daemon's release store after it settled the block's bytes.
  return Generation(__atomic_load_n(&header(block).generation, __ATOMIC_ACQUIRE));
}

absl::Status MappedChunk::RegisterWithGpu() {
  absl::MutexLock lock(&mutex_);
  if (registration_ != nullptr) {
    return absl::OkStatus();
  }
  // Entered in the page tables first: CUDA keeps all launches of the process waiting while it
  // registers, which then takes half as long.
  ::madvise(const_cast<std::byte*>(mapping_.data()), layout_.total_bytes(), MADV_POPULATE_READ);
  CRUMB_ASSIGN_OR_RETURN(
      registration_,
      HostRegistration::Create({mapping_.data(), layout_.total_bytes()}, /*is_read_only=*/true));
  return absl::OkStatus();
}

void MappedChunk::Populate(uint32_t block) const {
  // A hint: where the kernel lacks it (before 5.14), the first touch does it.
  ::madvise(const_cast<std::byte*>(image(block).data()), layout_.block_stride(),
            MADV_POPULATE_READ);
}

absl::StatusOr<std::shared_ptr<MappedChunk>> ChunkMap::Get(ChunkId id,
                                                           PageEncoding encoding,
                                                           absl::Time deadline) {
  return cache_.Get(id, [&]() -> absl::StatusOr<std::shared_ptr<MappedChunk>> {
    CRUMB_ASSIGN_OR_RETURN(const MemorySocketClient::Chunk memory, socket_->GetChunk(id, deadline));
    return MappedChunk::Map(id, encoding, geometry_, memory);
  });
}

}  // namespace crumb
