// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/gpu_page_table.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/sequence/page_table.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

std::string NameOf(uint32_t page) {
  return absl::StrCat("page ", page, " (tokens ", page * uint64_t{kPageTokens}, " to ",
                      (page + uint64_t{1}) * kPageTokens - 1, ")");
}

uint32_t NumPages(uint32_t tokens) {
  return (tokens + kPageTokens - 1) / kPageTokens;
}

}  // namespace

GpuPageTable::~GpuPageTable() {
  Release();
  Truncate(0);
}

absl::Status GpuPageTable::Adopt(std::vector<SharedPage> prefix) {
  CRUMB_CHECK(pages_.empty() && !has_step_, "only an empty table adopts");
  const auto num_pages = static_cast<uint32_t>(prefix.size());
  const uint32_t history_end =
      HistoryEnd(num_pages * kPageTokens, shape_.windows.recent_tokens) / kPageTokens;
  std::vector<Entry> pages(num_pages);
  std::vector<const std::byte*> history;
  for (uint32_t p = 0; p < num_pages; ++p) {
    const bool is_sink = p < sink_pages();
    const bool has_bf16 = prefix[p].bf16 != nullptr;
    const bool has_int2 = prefix[p].int2 != nullptr;
    // Rows of a window are read at two bits only where the prefix has no others.
    const bool is_window = p >= history_end && prefix[p].has_bf16_elsewhere;
    if (!has_bf16 && (!has_int2 || is_sink || is_window)) {
      return absl::FailedPreconditionError(absl::StrCat(
          NameOf(p), " of the prefix is not on the GPU",
          is_sink     ? " in BF16, which the sink needs"
          : is_window ? " in BF16, which the recent window needs"
                      : "",
          "; bring it there by PrefixHandle::UploadToGpu, or compute the prompt without it"));
    }
    pages[p].in_history = !is_sink && has_int2 && (p < history_end || !has_bf16);
    if (pages[p].in_history) {
      history.push_back(prefix[p].int2);
    }
  }
  shared_ = std::move(prefix);
  pages_ = std::move(pages);
  history_ = std::move(history);
  num_adopted_history_ = history_.size();
  AdvanceHistoryEnd();
  return absl::OkStatus();
}

void GpuPageTable::AdvanceHistoryEnd() {
  history_end_page_ = std::max(history_end_page_, sink_pages());
  while (history_end_page_ < pages_.size() && pages_[history_end_page_].in_history) {
    ++history_end_page_;
  }
}

absl::Status GpuPageTable::Extend(uint32_t num_pages) {
  const uint32_t before = this->num_pages();
  if (num_pages <= before) {
    return absl::OkStatus();
  }
  taken_.resize(num_pages - before);
  CRUMB_RETURN_IF_ERROR(source_->Take(PageEncoding::kBf16, taken_));
  for (std::byte* page : taken_) {
    pages_.push_back({.bf16 = page});
  }
  return absl::OkStatus();
}

void GpuPageTable::Truncate(uint32_t num_pages) {
  while (pages_.size() > num_pages) {
    Entry& page = pages_.back();
    ReturnBf16(&page);
    if (page.int2 != nullptr) {
      source_->Return(PageEncoding::kInt2, page.int2);
    }
    pages_.pop_back();
  }
}

void GpuPageTable::ReturnBf16(Entry* page) {
  if (page->bf16 != nullptr) {
    source_->Return(PageEncoding::kBf16, std::exchange(page->bf16, nullptr));
  }
}

void GpuPageTable::Plan(uint32_t first, uint32_t length, std::vector<Demotion>* demotions) const {
  const uint32_t end = HistoryEnd(length, shape_.windows.recent_tokens) / kPageTokens;
  for (uint32_t p = std::max(first, sink_pages()); p < end; ++p) {
    if (!pages_[p].in_history) {
      demotions->push_back({.page = PageIdx(p), .bf16 = Page(PageIdx(p), PageEncoding::kBf16)});
    }
  }
}

absl::Status GpuPageTable::TakeInt2() {
  const auto is_ours = [&](const Demotion& d) { return Shared(d.page.value()).int2 == nullptr; };
  taken_.clear();
  for (const std::vector<Demotion>* demotions : {&overdue_, &due_}) {
    taken_.resize(taken_.size() + static_cast<size_t>(std::count_if(demotions->begin(),
                                                                    demotions->end(), is_ours)));
  }
  CRUMB_RETURN_IF_ERROR(source_->Take(PageEncoding::kInt2, taken_));
  auto next = taken_.begin();
  for (std::vector<Demotion>* demotions : {&overdue_, &due_}) {
    for (Demotion& demotion : *demotions) {
      demotion.int2 = is_ours(demotion) ? *next++ : nullptr;
    }
  }
  return absl::OkStatus();
}

absl::Status GpuPageTable::Reserve(uint32_t length, uint32_t num_tokens) {
  CRUMB_CHECK(!has_step_, "one step at a time");
  pages_before_ = num_pages();
  CRUMB_RETURN_IF_ERROR(Extend(NumPages(length + num_tokens)));
  has_step_ = true;
  Plan(history_end_page_, length, &overdue_);
  const uint32_t overdue_end = HistoryEnd(length, shape_.windows.recent_tokens) / kPageTokens;
  Plan(std::max(history_end_page_, overdue_end), length + num_tokens, &due_);
  absl::Status status = TakeInt2();
  if (!status.ok()) {
    overdue_.clear();  // They have no pages to give back.
    due_.clear();
    Release();
  }
  return status;
}

void GpuPageTable::Commit(std::vector<Demotion>* demotions) {
  for (const Demotion& demotion : *demotions) {
    const uint32_t p = demotion.page.value();
    Entry& page = pages_[p];
    page.int2 = demotion.int2;
    page.in_history = true;
    history_.push_back(page.int2 != nullptr ? page.int2 : Shared(p).int2);
    if (p < retained_first_ || p >= retained_end_) {
      ReturnBf16(&page);
    }
  }
  demotions->clear();
  AdvanceHistoryEnd();
}

void GpuPageTable::Commit() {
  CRUMB_CHECK(has_step_ && overdue_.empty(), "what is overdue goes first");
  Commit(&due_);
  has_step_ = false;
}

void GpuPageTable::Release() {
  if (!has_step_) {
    return;
  }
  for (std::vector<Demotion>* demotions : {&overdue_, &due_}) {
    for (const Demotion& demotion : *demotions) {
      if (demotion.int2 != nullptr) {
        source_->Return(PageEncoding::kInt2, demotion.int2);
      }
    }
    demotions->clear();
  }
  Truncate(pages_before_);
  has_step_ = false;
}

const std::byte* GpuPageTable::Page(PageIdx page, PageEncoding encoding) const {
  if (page.value() >= pages_.size()) {
    return nullptr;
  }
  const Entry& entry = pages_[page.value()];
  const SharedPage shared = Shared(page.value());
  if (encoding == PageEncoding::kInt2) {
    return entry.int2 != nullptr ? entry.int2 : shared.int2;
  }
  return entry.bf16 != nullptr ? entry.bf16 : shared.bf16;
}

void GpuPageTable::CollectWindows(std::vector<const std::byte*>* windows) const {
  windows->clear();
  const auto add = [&](uint32_t p) {
    if (!pages_[p].in_history) {
      windows->push_back(Page(PageIdx(p), PageEncoding::kBf16));
    }
  };
  for (uint32_t p = 0; p < std::min(sink_pages(), num_pages()); ++p) {
    add(p);
  }
  for (uint32_t p = std::max(history_end_page_, sink_pages()); p < num_pages(); ++p) {
    add(p);
  }
}

absl::Status GpuPageTable::Retain(uint32_t first_page, uint32_t end_page) {
  for (uint32_t p = first_page; p < std::min(end_page, num_pages()); ++p) {
    if (Page(PageIdx(p), PageEncoding::kBf16) == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat(NameOf(p),
                       " is held at two bits only, its BF16 rows are gone; ask for the tail before "
                       "the sequence grows past it"));
    }
  }
  SetRetained(first_page, end_page);
  return absl::OkStatus();
}

void GpuPageTable::SetRetained(uint32_t first_page, uint32_t end_page) {
  for (uint32_t p = retained_first_; p < std::min(retained_end_, num_pages()); ++p) {
    if (pages_[p].in_history && (p < first_page || p >= end_page)) {
      ReturnBf16(&pages_[p]);
    }
  }
  retained_first_ = first_page;
  retained_end_ = end_page;
}

Sequence::Footprint GpuPageTable::footprint() const {
  const size_t int2_bytes = shape_.geometry.PageBytes(PageEncoding::kInt2);
  const size_t bf16_bytes = shape_.geometry.PageBytes(PageEncoding::kBf16);
  Sequence::Footprint total;
  for (const Entry& page : pages_) {
    total.own_int2_bytes += page.int2 != nullptr ? int2_bytes : 0;
    total.own_bf16_bytes += page.bf16 != nullptr ? bf16_bytes : 0;
    if (page.in_history && page.int2 == nullptr) {
      total.shared_int2_bytes += int2_bytes;
    } else if (!page.in_history && page.bf16 == nullptr) {
      total.shared_bf16_bytes += bf16_bytes;
    }
  }
  return total;
}

}  // namespace crumb
