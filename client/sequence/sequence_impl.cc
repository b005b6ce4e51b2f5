// SPDX-License-Identifier: Apache-2.0
#include "client/sequence/sequence_impl.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

#include "crumb/cuda/demote.h"
#include "proto/base/status_macros.h"
#include "proto/base/streaming_copy.h"

namespace crumb {
namespace {

Geometry RankGeometry(const Sequence::Options& options) {
  Geometry geometry = options.profile->geometry();
  geometry.num_kv_heads = options.heads.count;
  return geometry;
}

absl::Status CheckSize(const char* what, size_t found, size_t tokens, size_t heads, size_t dim) {
  if (found == tokens * heads * dim) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(what, " have ", found,
                                                 " elements, the chunk needs [", tokens, ", ",
                                                 heads, ", ", dim, "] = ", tokens * heads * dim));
}

uint32_t NumPages(uint32_t tokens) {
  return (tokens + kPageTokens - 1) / kPageTokens;
}

}  // namespace

Sequence::Impl::Impl(Options options)
    : options_(std::move(options)),
      rank_(RankGeometry(options_)),
      pages_({.geometry = rank_,
              .heads = options_.heads,
              .windows = options_.profile->windows(),
              .profile_id = options_.profile->id(),
              .keep_all_bf16 = options_.keep_all_bf16}),
      pool_(options_.num_threads),
      workers_(options_.num_threads) {}

// shared: with the handle's other users.
absl::Status Sequence::Impl::Adopt(std::shared_ptr<SharedPrefix> prefix) {
  if (length_ != 0 || chunk_tokens_ != 0 || pages_.prefix() != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("the sequence holds ", length_,
                     " tokens already; adopt a prefix before the first chunk, once"));
  }
  if (prefix == nullptr || prefix->num_pages() == 0) {
    return absl::OkStatus();  // A miss.
  }
  if (prefix->num_pages() > options_.max_tokens / kPageTokens) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the prefix has ", prefix->num_pages() * uint64_t{kPageTokens},
        " tokens, the sequence may have ", options_.max_tokens, "; raise Options::max_tokens"));
  }
  const uint32_t tokens = prefix->num_pages() * kPageTokens;
  CRUMB_RETURN_IF_ERROR(pages_.Adopt(std::move(prefix)));
  length_ = tokens;
  return absl::OkStatus();
}

absl::Status Sequence::Impl::RetainTail(uint32_t prefix_tokens) {
  if (prefix_tokens % kPageTokens != 0) {
    return absl::InvalidArgumentError(absl::StrCat("prefix_tokens is ", prefix_tokens,
                                                   "; it must be a multiple of ", kPageTokens));
  }
  const Windows& windows = options_.profile->windows();
  const uint32_t start =
      prefix_tokens > windows.recent_tokens ? prefix_tokens - windows.recent_tokens : 0;
  return pages_.Retain(start / kPageTokens, prefix_tokens / kPageTokens);
}

absl::Status Sequence::Impl::BeginChunk(uint32_t num_tokens) {
  if (chunk_tokens_ != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "a chunk of ", chunk_tokens_, " tokens is open; call EndChunk or AbandonChunk first"));
  }
  if (num_tokens == 0) {
    return absl::InvalidArgumentError("a chunk has at least one token");
  }
  if (num_tokens > options_.max_tokens - length_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the sequence holds ", length_, " tokens and ", num_tokens,
                     " more would pass ", options_.max_tokens, "; raise Options::max_tokens"));
  }
  CRUMB_RETURN_IF_ERROR(pages_.Extend(NumPages(length_ + num_tokens)));
  chunk_tokens_ = num_tokens;
  appended_.assign(rank_.num_layers, false);
  return absl::OkStatus();
}

absl::Status Sequence::Impl::CheckChunk(const char* call, uint32_t layer) const {
  if (chunk_tokens_ == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(call, " with no chunk open; call BeginChunk first"));
  }
  if (layer >= rank_.num_layers) {
    return absl::InvalidArgumentError(absl::StrCat(call, " of layer ", layer, "; the model has ",
                                                   rank_.num_layers, " layers, counted from 0"));
  }
  return absl::OkStatus();
}

absl::Status Sequence::Impl::Append(uint32_t layer,
                                    std::span<const float> keys,
                                    std::span<const float> values) {
  CRUMB_RETURN_IF_ERROR(CheckChunk("Append", layer));
  CRUMB_RETURN_IF_ERROR(
      CheckSize("keys", keys.size(), chunk_tokens_, rank_.num_kv_heads, rank_.key_dim));
  CRUMB_RETURN_IF_ERROR(
      CheckSize("values", values.size(), chunk_tokens_, rank_.num_kv_heads, rank_.value_dim));
  if (appended_[layer]) {
    return absl::FailedPreconditionError(
        absl::StrCat("layer ", layer, " of this chunk was appended already"));
  }
  const size_t multiply_adds = keys.size() * rank_.key_dim + values.size() * rank_.value_dim;
  CRUMB_RETURN_IF_ERROR(
      pool_.ParallelFor(rank_.num_kv_heads, multiply_adds, [&](size_t item, uint32_t worker) {
        return AppendHead(layer, static_cast<uint32_t>(item), keys, values, &workers_[worker]);
      }));
  appended_[layer] = true;
  return absl::OkStatus();
}

absl::Status Sequence::Impl::AppendHead(uint32_t layer,
                                        uint32_t head_of_rank,
                                        std::span<const float> keys,
                                        std::span<const float> values,
                                        HeadWorker* worker) {
  const size_t key_stride = size_t{rank_.num_kv_heads} * rank_.key_dim;
  const size_t value_stride = size_t{rank_.num_kv_heads} * rank_.value_dim;
  const float* head_keys = keys.data() + size_t{head_of_rank} * rank_.key_dim;
  const float* head_values = values.data() + size_t{head_of_rank} * rank_.value_dim;
  const size_t value_offset = rank_.Bf16Block().value_offset();
  for (uint32_t done = 0; done < chunk_tokens_;) {
    const uint32_t position = length_ + done;
    const uint32_t row = position % kPageTokens;
    const uint32_t num_rows = std::min(chunk_tokens_ - done, kPageTokens - row);
    std::byte* block = pages_.WritableBlock(PageIdx(position / kPageTokens), layer, head_of_rank);
    const std::optional<uint32_t> bad_row = worker->RotateRows(
        head(layer, head_of_rank), num_rows, {head_keys + done * key_stride, key_stride},
        {head_values + done * value_stride, value_stride},
        reinterpret_cast<BFloat16*>(block) + size_t{row} * rank_.key_dim,
        reinterpret_cast<BFloat16*>(block + value_offset) + size_t{row} * rank_.value_dim);
    if (bad_row.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "layer ", layer, ", KV head ", options_.heads.first + head_of_rank, ", token ",
          position + *bad_row,
          ": K or V is not finite, or not in the range of bfloat16 once rotated; abandon the chunk "
          "and check the model's activations"));
    }
    done += num_rows;
  }
  return absl::OkStatus();
}

absl::Status Sequence::Impl::WaitForPrefix(uint32_t end_layer) {
  if (pages_.prefix() == nullptr) {
    return absl::OkStatus();
  }
  for (; prefix_layers_ready_ < end_layer; ++prefix_layers_ready_) {
    CRUMB_RETURN_IF_ERROR(pages_.prefix()->WaitForLayer(prefix_layers_ready_));
  }
  return absl::OkStatus();
}

absl::Status Sequence::Impl::Attend(uint32_t layer,
                                    std::span<const float> queries,
                                    std::span<float> out) {
  CRUMB_RETURN_IF_ERROR(CheckChunk("Attend", layer));
  const uint32_t query_heads = options_.num_query_heads;
  CRUMB_RETURN_IF_ERROR(
      CheckSize("queries", queries.size(), chunk_tokens_, query_heads, rank_.key_dim));
  CRUMB_RETURN_IF_ERROR(
      CheckSize("outputs", out.size(), chunk_tokens_, query_heads, rank_.value_dim));
  if (!appended_[layer]) {
    return absl::FailedPreconditionError(absl::StrCat(
        "Attend of layer ", layer, " before its Append; append the chunk's own rows first"));
  }
  CRUMB_RETURN_IF_ERROR(WaitForPrefix(layer + 1));
  const uint32_t group = query_heads / rank_.num_kv_heads;
  const uint32_t num_blocks = (chunk_tokens_ + kQueryBlock - 1) / kQueryBlock;
  const size_t multiply_adds = queries.size() * (rank_.key_dim + length_ + chunk_tokens_) *
                               (1 + rank_.value_dim / rank_.key_dim);
  return pool_.ParallelFor(
      size_t{num_blocks} * rank_.num_kv_heads, multiply_adds, [&](size_t item, uint32_t worker) {
        const auto kv_head = static_cast<uint32_t>(item % rank_.num_kv_heads);
        // Later blocks see more and take longer: they go first.
        const auto block = num_blocks - 1 - static_cast<uint32_t>(item / rank_.num_kv_heads);
        const uint32_t first = block * kQueryBlock;
        const uint32_t count = std::min(kQueryBlock, chunk_tokens_ - first);
        const size_t query_row = size_t{query_heads} * rank_.key_dim;
        const size_t out_row = size_t{query_heads} * rank_.value_dim;
        const size_t head_offset = size_t{kv_head} * group;
        return workers_[worker].Attend(
            head(layer, kv_head), pages_,
            {.layer = layer,
             .head = kv_head,
             .num_queries = count,
             .num_tokens = length_ + first + count,
             .group = group,
             .scale = options_.scale,
             .queries = {queries.data() + first * query_row + head_offset * rank_.key_dim,
                         query_row},
             .out = {out.data() + first * out_row + head_offset * rank_.value_dim, out_row}});
      });
}

absl::Status Sequence::Impl::EndChunk() {
  if (chunk_tokens_ == 0) {
    return absl::FailedPreconditionError("EndChunk with no chunk open; call BeginChunk first");
  }
  absl::Status status = FinishChunk();
  if (!status.ok()) {
    AbandonChunk();
  }
  return status;
}

absl::Status Sequence::Impl::FinishChunk() {
  const auto missing = std::find(appended_.begin(), appended_.end(), false);
  if (missing != appended_.end()) {
    return absl::FailedPreconditionError(
        absl::StrCat("layer ", missing - appended_.begin(), " of ", appended_.size(),
                     " was not appended; a chunk ends after Append of every layer"));
  }
  const uint32_t length = length_ + chunk_tokens_;
  CRUMB_ASSIGN_OR_RETURN(auto demotions, pages_.PlanDemotion(length));
  CRUMB_RETURN_IF_ERROR(Demote(&demotions));
  if (pages_.prefix() != nullptr) {
    // Last: it vouches for every read of shared memory before it, demotion's included.
    CRUMB_RETURN_IF_ERROR(pages_.prefix()->Validate());
  }
  pages_.CommitDemotion(std::move(demotions));
  length_ = length;
  chunk_tokens_ = 0;
  return absl::OkStatus();
}

absl::Status Sequence::Impl::Demote(std::vector<PageTable::Demotion>* demotions) {
  std::vector<PageTable::Demotion*> filled;  // Those whose bytes are ours to make.
  for (PageTable::Demotion& demotion : *demotions) {
    if (demotion.int2) {
      filled.push_back(&demotion);
    }
  }
  if (filled.empty()) {
    return absl::OkStatus();
  }
  CRUMB_RETURN_IF_ERROR(WaitForPrefix(rank_.num_layers));
  const size_t blocks_a_page = rank_.NumHeadBlocks();
  const size_t block_bytes = rank_.HeadBlockBytes(PageEncoding::kInt2);
  const size_t num_items = filled.size() * blocks_a_page;
  const size_t multiply_adds =
      num_items * kPageTokens * (size_t{rank_.key_dim} * rank_.key_dim + rank_.value_dim);
  return pool_.ParallelFor(num_items, multiply_adds, [&](size_t item, uint32_t) -> absl::Status {
    PageTable::Demotion& demotion = *filled[item / blocks_a_page];
    const size_t block = item % blocks_a_page;
    const auto kv_head = static_cast<uint32_t>(block / rank_.num_layers);
    const auto layer = static_cast<uint32_t>(block % rank_.num_layers);
    const std::byte* rows = pages_.Block(demotion.page, PageEncoding::kBf16, layer, kv_head);
    const auto* keys = reinterpret_cast<const BFloat16*>(rows);
    const auto* values = reinterpret_cast<const BFloat16*>(rows + rank_.Bf16Block().value_offset());
    const absl::Status status =
        DemoteHeadBlock(head(layer, kv_head), {keys, size_t{kPageTokens} * rank_.key_dim},
                        {values, size_t{kPageTokens} * rank_.value_dim},
                        {demotion.int2.data() + block * block_bytes, block_bytes});
    if (status.ok()) {
      return absl::OkStatus();
    }
    return absl::Status(
        status.code(),
        absl::StrCat("layer ", layer, ", KV head ", options_.heads.first + kv_head,
                     ", page of token ", demotion.page.value() * uint64_t{kPageTokens}, ": ",
                     status.message()));
  });
}

void Sequence::Impl::AbandonChunk() {
  if (chunk_tokens_ != 0) {
    pages_.Truncate(NumPages(length_));
    chunk_tokens_ = 0;
  }
}

Sequence::Footprint Sequence::Impl::footprint() const {
  Footprint total = pages_.footprint();
  total.bf16_equivalent_bytes = size_t{length_} * rank_.num_layers * rank_.num_kv_heads *
                                (rank_.key_dim + rank_.value_dim) * sizeof(BFloat16);
  return total;
}

bool Sequence::Impl::HasPage(PageIdx page, PageEncoding encoding) const {
  if (page.value() >= length_ / kPageTokens) {
    return false;
  }
  for (uint32_t kv_head = 0; kv_head < rank_.num_kv_heads; ++kv_head) {
    if (pages_.Block(page, encoding, 0, kv_head) == nullptr) {
      return false;
    }
  }
  return true;
}

uint32_t Sequence::Impl::ExportHead(PageIdx page,
                                    PageEncoding encoding,
                                    uint32_t kv_head,
                                    std::span<std::byte> image) const {
  const size_t block_bytes = rank_.HeadBlockBytes(encoding);
  const auto block = [&](uint32_t layer) { return pages_.Block(page, encoding, layer, kv_head); };
  uint32_t crc = 0;
  for (uint32_t layer = 0; layer < rank_.num_layers;) {
    // Of an own page all layers follow each other; copies of one piece are faster.
    const std::byte* const first = block(layer);
    const size_t offset = rank_.HeadBlockOffset(encoding, layer, kv_head);
    size_t bytes = 0;
    do {
      bytes += block_bytes;
      ++layer;
    } while (layer < rank_.num_layers && block(layer) == first + bytes);
    crc = StreamingCopyWithCrc32c({first, bytes}, image.subspan(offset, bytes), crc);
  }
  return crc;
}

absl::Status Sequence::Impl::ExportPage(PageIdx page,
                                        PageEncoding encoding,
                                        std::span<std::byte> image,
                                        std::span<uint32_t> head_crc32c) const {
  if (image.size() != rank_.PageBytes(encoding)) {
    return absl::InvalidArgumentError(absl::StrCat("image has ", image.size(),
                                                   " bytes, a page of this encoding has ",
                                                   rank_.PageBytes(encoding)));
  }
  if (!head_crc32c.empty() && head_crc32c.size() != rank_.num_kv_heads) {
    return absl::InvalidArgumentError(absl::StrCat("head_crc32c has ", head_crc32c.size(),
                                                   " entries, the rank has ", rank_.num_kv_heads,
                                                   " KV heads"));
  }
  if (!HasPage(page, encoding)) {
    return absl::NotFoundError(absl::StrCat("page ", page.value(), " is not held in ",
                                            encoding == PageEncoding::kInt2 ? "INT2" : "BF16",
                                            "; the sequence has ", length_ / kPageTokens,
                                            " complete pages"));
  }
  const bool shared = pages_.prefix() != nullptr && page.value() < pages_.prefix()->num_pages();
  if (shared) {
    CRUMB_RETURN_IF_ERROR(pages_.prefix()->Validate());  // Waits for all bytes.
  }
  for (uint32_t kv_head = 0; kv_head < rank_.num_kv_heads; ++kv_head) {
    const uint32_t crc = ExportHead(page, encoding, kv_head, image);
    if (!head_crc32c.empty()) {
      head_crc32c[kv_head] = crc;
    }
  }
  return shared ? pages_.prefix()->Validate() : absl::OkStatus();
}

}  // namespace crumb
