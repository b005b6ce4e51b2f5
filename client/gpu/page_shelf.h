// SPDX-License-Identifier: Apache-2.0
//
// The pages of one size in a piece of memory: which are free, and which hold bytes that nobody may
// use. Only addresses; the memory itself, which may be a GPU's, is never touched.
//
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace crumb {

class PageShelf {
 public:
  PageShelf(std::byte* first, size_t page_bytes, uint32_t num_pages);

  // Fills `pages` and returns true, or takes nothing: fewer are free.
  [[nodiscard]] bool Take(std::span<std::byte*> pages);
  void Return(std::byte* page);  // One that was taken.

  // Marks a taken page until it is returned. A free page stays as it is: its user has gone.
  void Spoil(const std::byte* page);
  bool IsSpoiled(const std::byte* page) const { return states_[IndexOf(page)] == State::kSpoiled; }

  size_t page_bytes() const { return page_bytes_; }
  uint32_t num_pages() const { return static_cast<uint32_t>(states_.size()); }
  uint32_t num_free() const { return static_cast<uint32_t>(free_.size()); }
  uint32_t num_spoiled() const { return num_spoiled_; }

 private:
  enum class State : uint8_t { kFree, kTaken, kSpoiled };

  size_t IndexOf(const std::byte* page) const;

  std::byte* const first_;
  const size_t page_bytes_;
  std::vector<State> states_;
  std::vector<uint32_t>
      free_;  // The last one is the next to go: its bytes may still be in a cache.
  uint32_t num_spoiled_ = 0;
};

}  // namespace crumb
