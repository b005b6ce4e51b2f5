// SPDX-License-Identifier: Apache-2.0
#include "client/transport/mapped_source.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "client/transport/leased_block.h"
#include "proto/base/status_macros.h"
#include "proto/page/page_header.h"

namespace crumb {
namespace {

constexpr PageEncoding kEncodings[] = {PageEncoding::kInt2, PageEncoding::kBf16};

}  // namespace

absl::StatusOr<std::unique_ptr<MappedSource>> MappedSource::Open(const Options& options,
                                                                 const LeasedPrefix& prefix,
                                                                 ChunkMap* chunks,
                                                                 absl::Time deadline) {
  std::unique_ptr<MappedSource> source(new MappedSource(options));
  source->pages_.resize(prefix.pages.size());
  for (uint32_t p = 0; p < prefix.pages.size(); ++p) {
    for (const PageEncoding encoding : kEncodings) {
      if (!prefix.pages[p].of(encoding).present()) {
        continue;
      }
      CRUMB_ASSIGN_OR_RETURN(const Block block,
                             source->OpenBlock(prefix, PageIdx(p), encoding, chunks, deadline));
      (encoding == PageEncoding::kInt2 ? source->pages_[p].int2 : source->pages_[p].bf16) = block;
    }
  }
  return source;
}

absl::StatusOr<MappedSource::Block> MappedSource::OpenBlock(const LeasedPrefix& prefix,
                                                            PageIdx page,
                                                            PageEncoding encoding,
                                                            ChunkMap* chunks,
                                                            absl::Time deadline) {
  const BlockPlace& place = prefix.pages[page.value()].of(encoding);
  // shared: see chunks_.
  CRUMB_ASSIGN_OR_RETURN(std::shared_ptr<MappedChunk> chunk,
                         chunks->Get(place.chunk, encoding, deadline));
  if (chunk->encoding() != encoding || place.block >= chunk->num_blocks()) {
    return absl::InternalError(absl::StrCat(
        "page ", page.value(), ": the daemon places it in block ", place.block, " of chunk ",
        place.chunk.value(), ", which has ", chunk->num_blocks(), " blocks of ",
        chunk->encoding() == encoding ? "that" : "the other", " encoding"));
  }
  CRUMB_RETURN_IF_ERROR(CheckLeasedHeader(chunk->header(place.block),
                                          {.profile_id = options_.profile->id(),
                                           .namespace_id = prefix.namespace_id,
                                           .encoding = encoding,
                                           .generation = place.generation,
                                           .page_idx = page},
                                          options_.heads));
  const Block block{.chunk = chunk.get(),
                    .image = chunk->image(place.block).data(),
                    .block = place.block,
                    .generation = place.generation};
  // Pages of one prefix mostly follow each other in a chunk.
  if (chunks_.empty() || chunks_.back() != chunk) {
    chunks_.push_back(std::move(chunk));
  }
  return block;
}

const std::byte* MappedSource::HeadBlock(PageIdx page,
                                         PageEncoding encoding,
                                         uint32_t layer,
                                         uint32_t kv_head) const {
  const std::byte* const image = At(page, encoding).image;
  const HeadRange& heads = options_.heads;
  if (image == nullptr || kv_head < heads.first || kv_head - heads.first >= heads.count) {
    return nullptr;
  }
  return image + options_.profile->geometry().HeadBlockOffset(encoding, layer, kv_head);
}

template <typename Visitor>
absl::Status MappedSource::ForEachBlock(const Visitor& visit) const {
  for (uint32_t p = 0; p < pages_.size(); ++p) {
    for (const Block* block : {&pages_[p].int2, &pages_[p].bf16}) {
      absl::Status status = block->chunk == nullptr ? absl::OkStatus() : visit(PageIdx(p), *block);
      if (!status.ok()) {
        return status;
      }
    }
  }
  return absl::OkStatus();
}

absl::Status MappedSource::Verify(const Block& block) const {
  if (block.chunk->IsVerified(block.block, block.generation)) {
    return absl::OkStatus();
  }
  CRUMB_RETURN_IF_ERROR(VerifyPageImage(options_.profile->geometry(),
                                        block.chunk->header(block.block), options_.heads.Mask(),
                                        block.chunk->image(block.block)));
  block.chunk->SetVerified(block.block, block.generation);
  return absl::OkStatus();
}

absl::Status MappedSource::PopulateAndVerify() const {
  return ForEachBlock([&](PageIdx page, const Block& block) {
    if (options_.verify && block.chunk->IsVerified(block.block, block.generation)) {
      return absl::OkStatus();  // Its bytes were read, so it is in the page tables.
    }
    block.chunk->Populate(block.block);
    absl::Status status = options_.verify ? Verify(block) : absl::OkStatus();
    if (status.ok()) {
      return status;
    }
    // A block that is being reused has other bytes, which is no loss of data.
    const Generation now = block.chunk->LoadGeneration(block.block);
    return now == block.generation ? InPage(page, status)
                                   : BlockHasMoved(page, now, block.generation);
  });
}

absl::Status MappedSource::RegisterWithGpu() {
  for (const auto& chunk : chunks_) {
    CRUMB_RETURN_IF_ERROR(chunk->RegisterWithGpu());
  }
  return absl::OkStatus();
}

std::vector<uint32_t> MappedSource::UncheckedCrc32c(PageIdx page, PageEncoding encoding) const {
  const Block& block = At(page, encoding);
  if (!options_.verify || block.chunk == nullptr ||
      block.chunk->IsVerified(block.block, block.generation)) {
    return {};
  }
  const auto* const first =
      block.chunk->header(block.block).head_crc32c.data() + options_.heads.first;
  return {first, first + options_.heads.count};
}

void MappedSource::SetChecked(PageIdx page, PageEncoding encoding) {
  const Block& block = At(page, encoding);
  block.chunk->SetVerified(block.block, block.generation);
}

absl::Status MappedSource::WaitForLayer(uint32_t) {
  absl::MutexLock lock(&mutex_);  // Others wait for the bytes as well.
  if (!populated_) {
    verdict_ = PopulateAndVerify();
    populated_ = true;
  }
  return verdict_;
}

absl::Status MappedSource::Validate() {
  CRUMB_RETURN_IF_ERROR(WaitForLayer(0));
  // The reads that this vouches for come before the loads below.
  OrderReadsBefore();
  return ForEachBlock([](PageIdx page, const Block& block) {
    const Generation now = block.chunk->LoadGeneration(block.block);
    return now == block.generation ? absl::OkStatus() : BlockHasMoved(page, now, block.generation);
  });
}

}  // namespace crumb
