// SPDX-License-Identifier: Apache-2.0
//
// Where the rows of one sequence are: which page is attended at two bits and which in BF16, and
// whose memory it is read from. Holds memory, computes nothing.
//
// Invariants:
//   1. Each page is in exactly one region: history (read as INT2) or window (read as BF16).
//   2. A page of the sink, and a page at or after HistoryEnd(length), is in the window; other pages
//      before it are in history. Exception: an adopted page without BF16 rows is in history.
//   3. A page can be read in the encoding of its region: from its own buffer, or in place from the
//      adopted prefix.
//   4. Own BF16 rows of a page in history are held only inside the retained tail.
//
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "client/sequence/page_buffer.h"
#include "crumb/cuda/split_attention.h"
#include "crumb/sequence.h"
#include "proto/page/geometry.h"
#include "proto/page/usable_length.h"

namespace crumb {

// The end of history, a whole number of pages, for a chunk whose first query is at position
// `length`: that query, its own row included, still sees `recent_tokens` rows in BF16 (all there
// are, if fewer). Never beyond the complete pages of [0, length).
constexpr uint32_t HistoryEnd(uint32_t length, uint32_t recent_tokens) {
  const uint64_t seen = uint64_t{length} + 1;
  const uint64_t end = seen > recent_tokens ? seen - recent_tokens : 0;
  const uint64_t whole = end < length ? end : length;
  return static_cast<uint32_t>(whole / kPageTokens * kPageTokens);
}

class PageTable {
 public:
  struct Shape {
    Geometry geometry;  // Of the rank: num_kv_heads counts its heads only.
    HeadRange heads;    // In the model; count is never 0.
    Windows windows;
    ProfileId profile_id;
    bool keep_all_bf16 = false;
  };

  // A page on its way into history.
  struct Demotion {
    PageIdx page;
    PageBuffer int2;  // To be filled, an image of the rank; null: the prefix has the page in INT2.
  };

  explicit PageTable(const Shape& shape) : shape_(shape) {}

  uint32_t num_pages() const { return static_cast<uint32_t>(pages_.size()); }
  const std::shared_ptr<SharedPrefix>& prefix() const { return prefix_; }

  // Pages [0, prefix->num_pages()) of an empty table. FAILED_PRECONDITION as Sequence::Adopt; the
  // table is then as it was.
  absl::Status Adopt(std::shared_ptr<SharedPrefix> prefix);

  // Makes it `num_pages` long, with own BF16 pages of indeterminate bytes. RESOURCE_EXHAUSTED: no
  // memory; the table is then as it was.
  absl::Status Extend(uint32_t num_pages);
  // Back to `num_pages`, at least the adopted ones.
  void Truncate(uint32_t num_pages);

  bool in_history(PageIdx page) const { return pages_[page.value()].in_history; }
  // One head block in an encoding, or null. `head` counts from 0 in the rank.
  const std::byte* Block(PageIdx page, PageEncoding encoding, uint32_t layer, uint32_t head) const;
  // Of an own BF16 page.
  std::byte* WritableBlock(PageIdx page, uint32_t layer, uint32_t head);

  // What attention over the first `num_tokens` rows reads of one layer and head.
  struct Regions {
    std::vector<const std::byte*> history;  // Whole pages.
    std::vector<Bf16Rows> windows;          // In order of position.
  };
  void CollectRegions(uint32_t num_tokens, uint32_t layer, uint32_t head, Regions* regions) const;

  // The pages that must leave the window when the sequence is `length` long, with memory for their
  // INT2 images. Changes nothing. RESOURCE_EXHAUSTED: no memory.
  absl::StatusOr<std::vector<Demotion>> PlanDemotion(uint32_t length) const;
  // Moves filled pages into history.
  void CommitDemotion(std::vector<Demotion> demotions);

  // Pages [first, end) keep their BF16 rows in history as well; replaces an earlier range.
  // FAILED_PRECONDITION: a page has lost them already.
  absl::Status Retain(uint32_t first_page, uint32_t end_page);
  void ReleaseRetained() { SetRetained(0, 0); }

  Sequence::Footprint footprint() const;

 private:
  struct Page {
    PageBuffer bf16;  // Own; null where shared, or given up.
    PageBuffer int2;  // Own; null where shared, or not demoted.
    bool in_history = false;
  };

  bool InPrefix(PageIdx page) const {
    return prefix_ != nullptr && page.value() < prefix_->num_pages();
  }
  bool SharedHas(PageIdx page, PageEncoding encoding) const;
  void SetRetained(uint32_t first_page, uint32_t end_page);

  Shape shape_;
  std::shared_ptr<SharedPrefix> prefix_;  // shared: with the handle's other users.
  std::vector<Page> pages_;
  uint32_t history_end_page_ = 0;  // Pages of [sink, here) are in history.
  uint32_t retained_first_ = 0;
  uint32_t retained_end_ = 0;
};

}  // namespace crumb
