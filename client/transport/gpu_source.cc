// SPDX-License-Identifier: Apache-2.0
#include "client/transport/gpu_source.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "client/transport/leased_block.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

constexpr PageEncoding kEncodings[] = {PageEncoding::kInt2, PageEncoding::kBf16};

}  // namespace

LeasedPrefix GpuSource::RestOf(const LeasedPrefix& prefix) {
  LeasedPrefix rest = prefix;
  for (PagePlaces& page : rest.pages) {
    if (page.gpu_int2.present()) {
      page.int2 = {};
    }
    if (page.gpu_bf16.present()) {
      page.bf16 = {};
    }
  }
  return rest;
}

absl::StatusOr<std::unique_ptr<GpuSource>> GpuSource::Open(const Options& options,
                                                           const LeasedPrefix& prefix,
                                                           std::unique_ptr<PageSource> rest,
                                                           GpuChunkMap* chunks,
                                                           absl::Time deadline) {
  std::unique_ptr<GpuSource> source(new GpuSource(std::move(rest)));
  source->pages_.resize(prefix.pages.size());
  for (uint32_t p = 0; p < prefix.pages.size(); ++p) {
    for (const PageEncoding encoding : kEncodings) {
      if (prefix.pages[p].on_gpu(encoding).present()) {
        Page& page = source->pages_[p];
        CRUMB_ASSIGN_OR_RETURN(
            (encoding == PageEncoding::kInt2 ? page.int2 : page.bf16),
            source->OpenBlock(options, prefix, PageIdx(p), encoding, chunks, deadline));
      }
    }
  }
  return source;
}

absl::StatusOr<GpuSource::Block> GpuSource::OpenBlock(const Options& options,
                                                      const LeasedPrefix& prefix,
                                                      const PageIdx& page,
                                                      PageEncoding encoding,
                                                      GpuChunkMap* chunks,
                                                      absl::Time deadline) {
  const BlockPlace& place = prefix.pages[page.value()].on_gpu(encoding);
  // shared: see chunks_.
  CRUMB_ASSIGN_OR_RETURN(std::shared_ptr<GpuChunk> chunk,
                         chunks->Get(place.chunk, encoding, deadline));
  if (chunk->encoding() != encoding || place.block >= chunk->num_blocks()) {
    return absl::InternalError(absl::StrCat(
        "page ", page.value(), ": the daemon places its copy in block ", place.block, " of chunk ",
        place.chunk.value(), " of copies, which has ", chunk->num_blocks(), " blocks of ",
        chunk->encoding() == encoding ? "that" : "the other", " encoding"));
  }
  CRUMB_RETURN_IF_ERROR(CheckLeasedHeader(chunk->header(place.block),
                                          {.profile_id = options.profile->id(),
                                           .namespace_id = prefix.namespace_id,
                                           .encoding = encoding,
                                           .generation = place.generation,
                                           .page_idx = page},
                                          options.heads));
  const Block block{.chunk = chunk.get(), .block = place.block, .generation = place.generation};
  // Pages of one prefix mostly follow each other in a chunk.
  if (chunks_.empty() || chunks_.back() != chunk) {
    chunks_.push_back(std::move(chunk));
  }
  return block;
}

const std::byte* GpuSource::GpuPage(PageIdx page, PageEncoding encoding) const {
  const Page& entry = pages_[page.value()];
  const Block& block = encoding == PageEncoding::kInt2 ? entry.int2 : entry.bf16;
  return block.chunk == nullptr ? nullptr : block.chunk->image(block.block);
}

absl::Status GpuSource::Validate() {
  CRUMB_RETURN_IF_ERROR(rest_->Validate());
  // Kernels whose results are believed by this have been waited for: their reads came before.
  OrderReadsBefore();
  for (uint32_t p = 0; p < pages_.size(); ++p) {
    for (const Block* block : {&pages_[p].int2, &pages_[p].bf16}) {
      if (block->chunk == nullptr) {
        continue;
      }
      const Generation now = block->chunk->LoadGeneration(block->block);
      if (now != block->generation) {
        return BlockHasMoved(PageIdx(p), now, block->generation);
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace crumb
