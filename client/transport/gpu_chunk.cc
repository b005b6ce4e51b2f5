// SPDX-License-Identifier: Apache-2.0
#include "client/transport/gpu_chunk.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "proto/base/status_macros.h"

namespace crumb {

GpuChunk::GpuChunk(PageEncoding encoding,
                   const ChunkLayout& layout,
                   SealedMapping headers,
                   std::unique_ptr<SharedGpuMemory> memory)
    : encoding_(encoding),
      layout_(layout),
      headers_(std::move(headers)),
      memory_(std::move(memory)) {}

// shared: by all prefixes that lie in the chunk.
absl::StatusOr<std::shared_ptr<GpuChunk>> GpuChunk::Map(ChunkId id,
                                                        PageEncoding encoding,
                                                        const Geometry& geometry,
                                                        int device,
                                                        const MemorySocketClient::Chunk& chunk) {
  const ChunkLayout layout{.image_bytes = geometry.PageBytes(encoding),
                           .num_blocks = static_cast<uint32_t>(chunk.num_blocks)};
  if (chunk.num_blocks == 0 || chunk.num_blocks > (1u << 20) ||
      layout.num_blocks * layout.block_stride() > chunk.bytes) {
    return absl::FailedPreconditionError(
        absl::StrCat("chunk ", id.value(), " of copies has ", chunk.bytes, " bytes for ",
                     chunk.num_blocks, " pages of ", layout.image_bytes,
                     " bytes, which do not fit; use the library and the daemon of one release"));
  }
  CRUMB_ASSIGN_OR_RETURN(
      SealedMapping headers,
      SealedMapping::Map(chunk.memfd.get(), layout.block_offset(0),
                         absl::StrCat("the headers of chunk ", id.value(), " of copies")));
  auto memory = SharedGpuMemory::Open(device, chunk.gpu_memory.get(), chunk.bytes);
  if (!memory.ok()) {
    return absl::Status(
        memory.status().code(),
        absl::StrCat("chunk ", id.value(), " of copies: ", memory.status().message()));
  }
  return std::shared_ptr<GpuChunk>(
      new GpuChunk(encoding, layout, std::move(headers), *std::move(memory)));
}

Generation GpuChunk::LoadGeneration(uint32_t block) const {
  // Pairs with the daemon's release store after it settled the block's bytes.
  return Generation(__atomic_load_n(&header(block).generation, __ATOMIC_ACQUIRE));
}

absl::StatusOr<std::shared_ptr<GpuChunk>> GpuChunkMap::Get(ChunkId id,
                                                           PageEncoding encoding,
                                                           absl::Time deadline) {
  return cache_.Get(id, [&]() -> absl::StatusOr<std::shared_ptr<GpuChunk>> {
    CRUMB_ASSIGN_OR_RETURN(const MemorySocketClient::Chunk chunk,
                           socket_->GetCopyChunk(id, deadline));
    return GpuChunk::Map(id, encoding, geometry_, device_, chunk);
  });
}

}  // namespace crumb
