// SPDX-License-Identifier: Apache-2.0
#include "client/sequence/page_table.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

#include "proto/base/check.h"

namespace crumb {
namespace {

std::string NameOf(PageIdx page) {
  return absl::StrCat("page ", page.value(), " (tokens ", page.value() * uint64_t{kPageTokens},
                      " to ", (page.value() + uint64_t{1}) * kPageTokens - 1, ")");
}

absl::Status NoMemory(size_t num_pages, size_t page_bytes) {
  return absl::ResourceExhaustedError(absl::StrCat("no memory for ", num_pages, " more pages of ",
                                                   page_bytes,
                                                   " bytes; shorten the sequence, or end others"));
}

}  // namespace

bool PageTable::SharedHas(PageIdx page, PageEncoding encoding) const {
  if (!InPrefix(page)) {
    return false;
  }
  // Presence is per head and holds for all its layers.
  for (uint32_t head = 0; head < shape_.heads.count; ++head) {
    if (prefix_->HeadBlock(page, encoding, 0, shape_.heads.first + head) == nullptr) {
      return false;
    }
  }
  return true;
}

// shared: with the handle's other users.
absl::Status PageTable::Adopt(std::shared_ptr<SharedPrefix> prefix) {
  CRUMB_CHECK(pages_.empty() && prefix_ == nullptr, "only an empty table adopts");
  if (prefix->profile_id() != shape_.profile_id) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the prefix is of profile ", prefix->profile_id().Short(), ", the sequence of ",
        shape_.profile_id.Short(), "; attach the client with the sequence's profile"));
  }
  const uint32_t num_pages = prefix->num_pages();
  const uint32_t sink_pages = shape_.windows.sink_tokens / kPageTokens;
  const uint32_t history_end =
      shape_.keep_all_bf16
          ? 0
          : HistoryEnd(num_pages * kPageTokens, shape_.windows.recent_tokens) / kPageTokens;
  prefix_ = std::move(prefix);
  std::vector<Page> pages(num_pages);
  for (uint32_t p = 0; p < num_pages; ++p) {
    const bool has_bf16 = SharedHas(PageIdx(p), PageEncoding::kBf16);
    const bool has_int2 = SharedHas(PageIdx(p), PageEncoding::kInt2);
    if (!has_bf16 && (!has_int2 || p < sink_pages)) {
      prefix_ = nullptr;
      return absl::FailedPreconditionError(absl::StrCat(
          NameOf(PageIdx(p)), " of the prefix has no ",
          p < sink_pages ? "BF16 rows, which the sink needs," : "rows", " for KV heads ",
          shape_.heads.first, " to ", shape_.heads.first + shape_.heads.count - 1,
          "; compute the prompt without the prefix"));
    }
    pages[p].in_history = p >= sink_pages && has_int2 && (p < history_end || !has_bf16);
  }
  pages_ = std::move(pages);
  return absl::OkStatus();
}

absl::Status PageTable::Extend(uint32_t num_pages) {
  const size_t bytes = shape_.geometry.PageBytes(PageEncoding::kBf16);
  const size_t before = pages_.size();
  while (pages_.size() < num_pages) {
    Page page;
    page.bf16 = PageBuffer::Allocate(bytes);
    if (!page.bf16) {
      const size_t missing = num_pages - pages_.size();
      pages_.resize(before);
      return NoMemory(missing, bytes);
    }
    pages_.push_back(std::move(page));
  }
  return absl::OkStatus();
}

void PageTable::Truncate(uint32_t num_pages) {
  CRUMB_CHECK(prefix_ == nullptr || num_pages >= prefix_->num_pages(), "adopted pages stay");
  if (num_pages < pages_.size()) {
    pages_.resize(num_pages);
  }
}

const std::byte* PageTable::Block(PageIdx page,
                                  PageEncoding encoding,
                                  uint32_t layer,
                                  uint32_t head) const {
  const Page& entry = pages_[page.value()];
  const PageBuffer& own = encoding == PageEncoding::kInt2 ? entry.int2 : entry.bf16;
  if (own) {
    return own.data() + shape_.geometry.HeadBlockOffset(encoding, layer, head);
  }
  return InPrefix(page) ? prefix_->HeadBlock(page, encoding, layer, shape_.heads.first + head)
                        : nullptr;
}

std::byte* PageTable::WritableBlock(PageIdx page, uint32_t layer, uint32_t head) {
  Page& entry = pages_[page.value()];
  CRUMB_DCHECK(entry.bf16 && !entry.in_history, "rows are written into own window pages");
  return entry.bf16.data() + shape_.geometry.HeadBlockOffset(PageEncoding::kBf16, layer, head);
}

void PageTable::CollectRegions(uint32_t num_tokens,
                               uint32_t layer,
                               uint32_t head,
                               Regions* regions) const {
  regions->history.clear();
  regions->windows.clear();
  const size_t value_offset = shape_.geometry.Bf16Block().value_offset();
  for (uint32_t p = 0; p * kPageTokens < num_tokens; ++p) {
    if (in_history(PageIdx(p))) {
      regions->history.push_back(Block(PageIdx(p), PageEncoding::kInt2, layer, head));
      continue;
    }
    const std::byte* block = Block(PageIdx(p), PageEncoding::kBf16, layer, head);
    regions->windows.push_back({.keys = reinterpret_cast<const BFloat16*>(block),
                                .values = reinterpret_cast<const BFloat16*>(block + value_offset),
                                .num_tokens = std::min(num_tokens - p * kPageTokens, kPageTokens)});
  }
}

absl::StatusOr<std::vector<PageTable::Demotion>> PageTable::PlanDemotion(uint32_t length) const {
  std::vector<Demotion> demotions;
  if (shape_.keep_all_bf16) {
    return demotions;
  }
  const size_t bytes = shape_.geometry.PageBytes(PageEncoding::kInt2);
  const uint32_t end = HistoryEnd(length, shape_.windows.recent_tokens) / kPageTokens;
  for (uint32_t p = std::max(history_end_page_, shape_.windows.sink_tokens / kPageTokens); p < end;
       ++p) {
    if (in_history(PageIdx(p))) {
      continue;
    }
    Demotion demotion{.page = PageIdx(p), .int2 = {}};
    if (!SharedHas(PageIdx(p), PageEncoding::kInt2)) {
      demotion.int2 = PageBuffer::Allocate(bytes);
      if (!demotion.int2) {
        return NoMemory(end - p, bytes);
      }
    }
    demotions.push_back(std::move(demotion));
  }
  return demotions;
}

void PageTable::CommitDemotion(std::vector<Demotion> demotions) {
  for (Demotion& demotion : demotions) {
    const uint32_t p = demotion.page.value();
    Page& page = pages_[p];
    page.int2 = std::move(demotion.int2);
    page.in_history = true;
    if (p < retained_first_ || p >= retained_end_) {
      page.bf16.Reset();
    }
    history_end_page_ = std::max(history_end_page_, p + 1);
  }
}

absl::Status PageTable::Retain(uint32_t first_page, uint32_t end_page) {
  for (uint32_t p = first_page; p < std::min(end_page, num_pages()); ++p) {
    if (!pages_[p].bf16 && !SharedHas(PageIdx(p), PageEncoding::kBf16)) {
      return absl::FailedPreconditionError(
          absl::StrCat(NameOf(PageIdx(p)),
                       " is held at two bits only, its BF16 rows are gone; ask for the tail before "
                       "the sequence grows past it"));
    }
  }
  SetRetained(first_page, end_page);
  return absl::OkStatus();
}

void PageTable::SetRetained(uint32_t first_page, uint32_t end_page) {
  for (uint32_t p = retained_first_; p < std::min(retained_end_, num_pages()); ++p) {
    if (pages_[p].in_history && (p < first_page || p >= end_page)) {
      pages_[p].bf16.Reset();
    }
  }
  retained_first_ = first_page;
  retained_end_ = end_page;
}

Sequence::Footprint PageTable::footprint() const {
  const size_t int2_bytes = shape_.geometry.PageBytes(PageEncoding::kInt2);
  const size_t bf16_bytes = shape_.geometry.PageBytes(PageEncoding::kBf16);
  Sequence::Footprint total;
  for (uint32_t p = 0; p < num_pages(); ++p) {
    const Page& page = pages_[p];
    total.own_int2_bytes += page.int2 ? int2_bytes : 0;
    total.own_bf16_bytes += page.bf16 ? bf16_bytes : 0;
    if (page.in_history && !page.int2) {
      total.shared_int2_bytes += int2_bytes;
    } else if (!page.in_history && !page.bf16) {
      total.shared_bf16_bytes += bf16_bytes;
    }
  }
  return total;
}

}  // namespace crumb
