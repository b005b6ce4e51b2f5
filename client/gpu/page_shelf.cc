// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/page_shelf.h"

#include <utility>

#include "proto/base/check.h"

namespace crumb {

PageShelf::PageShelf(std::byte* first, size_t page_bytes, uint32_t num_pages)
    : first_(first), page_bytes_(page_bytes), states_(num_pages, State::kFree) {
  free_.reserve(num_pages);
  for (uint32_t page = num_pages; page-- > 0;) {
    free_.push_back(page);
  }
}

size_t PageShelf::IndexOf(const std::byte* page) const {
  const auto offset = static_cast<size_t>(page - first_);
  CRUMB_CHECK(page >= first_ && offset / page_bytes_ < states_.size() && offset % page_bytes_ == 0,
              "a page of this shelf");
  return offset / page_bytes_;
}

bool PageShelf::Take(std::span<std::byte*> pages) {
  if (pages.size() > free_.size()) {
    return false;
  }
  for (std::byte*& page : pages) {
    const uint32_t index = free_.back();
    free_.pop_back();
    states_[index] = State::kTaken;
    page = first_ + index * page_bytes_;
  }
  return true;
}

void PageShelf::Return(std::byte* page) {
  const size_t index = IndexOf(page);
  const State before = std::exchange(states_[index], State::kFree);
  CRUMB_CHECK(before != State::kFree, "a page is returned once");
  num_spoiled_ -= before == State::kSpoiled ? 1 : 0;
  free_.push_back(static_cast<uint32_t>(index));
}

void PageShelf::Spoil(const std::byte* page) {
  State& state = states_[IndexOf(page)];
  if (state == State::kTaken) {
    state = State::kSpoiled;
    ++num_spoiled_;
  }
}

}  // namespace crumb
