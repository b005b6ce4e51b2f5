// SPDX-License-Identifier: Apache-2.0
//
// Where the rows of one sequence are in a GPU's memory: client/sequence/page_table.h for pages that
// kernels read and write. Decides, remembers addresses and touches no memory; what it decides is
// done by whoever enqueues kernels, in the order in which this is called.
//
// Invariants as there: each page is in exactly one region, history (read as INT2) or window (read
// as BF16), and can be read in that region's encoding from a page of its own or of the adopted
// prefix. Besides: what is in history stays there, so `history()` only grows.
//
// A step of tokens:  Reserve  ->  [demote overdue()]  CommitOverdue  ->  rows are appended and
// attended  ->  [demote due()]  Commit; or Release at any point before Commit.
//
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"

#include "crumb/sequence.h"
#include "proto/base/ids.h"
#include "proto/page/geometry.h"
#include "proto/page/page_format.h"
#include "proto/page/usable_length.h"

namespace crumb {

// Where own pages come from and go to. A page that was returned may be taken again at once: the
// work on it is enqueued in the order of these calls.
class GpuPageSource {
 public:
  virtual ~GpuPageSource() = default;

  // All of `pages` or none. RESOURCE_EXHAUSTED with the numbers.
  virtual absl::Status Take(PageEncoding encoding, std::span<std::byte*> pages) = 0;
  virtual void Return(PageEncoding encoding, std::byte* page) = 0;
};

class GpuPageTable {
 public:
  struct Shape {
    Geometry geometry;  // Of the rank: num_kv_heads counts its heads only.
    Windows windows;
  };
  // A page of an adopted prefix: where the rank's first head begins, null where it is not there.
  struct SharedPage {
    const std::byte* int2 = nullptr;
    const std::byte* bf16 = nullptr;
    bool has_bf16_elsewhere = false;  // The prefix has the rows in BF16, but not on the GPU.
  };
  // A page on its way into history.
  struct Demotion {
    PageIdx page;
    const std::byte* bf16 = nullptr;  // To be read.
    std::byte* int2 = nullptr;        // To be filled; null: the prefix has the page in INT2.
  };

  // `source` outlives the table.
  GpuPageTable(const Shape& shape, GpuPageSource* source) : shape_(shape), source_(source) {}
  ~GpuPageTable();
  GpuPageTable(const GpuPageTable&) = delete;
  GpuPageTable& operator=(const GpuPageTable&) = delete;

  uint32_t num_pages() const { return static_cast<uint32_t>(pages_.size()); }

  // The first pages of an empty table. FAILED_PRECONDITION: a page lacks what its place needs; the
  // table is then as it was.
  absl::Status Adopt(std::vector<SharedPage> prefix);

  // For a step that brings a sequence of `length` tokens to `length + num_tokens`: BF16 pages for
  // the new rows, INT2 pages for all that leaves the window. RESOURCE_EXHAUSTED as the source says;
  // the table is then as it was.
  absl::Status Reserve(uint32_t length, uint32_t num_tokens);
  // What should be in history before the step's rows: after Adopt, pages that the prefix has in
  // BF16 alone. Empty otherwise.
  std::span<const Demotion> overdue() const { return overdue_; }
  void CommitOverdue() { Commit(&overdue_); }
  // What leaves the window with the step's rows.
  std::span<const Demotion> due() const { return due_; }
  void Commit();
  // As before Reserve, but for what was committed. No-op without a step.
  void Release();

  bool in_history(PageIdx page) const { return pages_[page.value()].in_history; }
  // The page in an encoding, own or shared; null: not held.
  const std::byte* Page(PageIdx page, PageEncoding encoding) const;
  // INT2 pages that attention reads, in the order in which they came to be; only ever appended to.
  std::span<const std::byte* const> history() const { return history_; }
  // Of those the first, which are the prefix's and the same for all that adopted it.
  size_t num_adopted_history() const { return num_adopted_history_; }
  // BF16 pages that attention reads, in order of position; all full but the last.
  void CollectWindows(std::vector<const std::byte*>* windows) const;

  // As PageTable::Retain.
  absl::Status Retain(uint32_t first_page, uint32_t end_page);
  void ReleaseRetained() { SetRetained(0, 0); }

  Sequence::Footprint footprint() const;
  // Calls `visit` with each own INT2 page.
  template <typename Visit>
  void ForEachOwnInt2(Visit visit) const {
    for (const Entry& page : pages_) {
      if (page.int2 != nullptr) {
        visit(page.int2);
      }
    }
  }

 private:
  struct Entry {
    std::byte* bf16 = nullptr;  // Own.
    std::byte* int2 = nullptr;  // Own.
    bool in_history = false;
  };

  SharedPage Shared(uint32_t page) const {
    return page < shared_.size() ? shared_[page] : SharedPage{};
  }
  uint32_t sink_pages() const { return shape_.windows.sink_tokens / kPageTokens; }
  absl::Status Extend(uint32_t num_pages);
  void Truncate(uint32_t num_pages);
  // Pages from `first` on that must leave the window at `length`; their INT2 pages are not taken.
  void Plan(uint32_t first, uint32_t length, std::vector<Demotion>* demotions) const;
  absl::Status TakeInt2();
  void Commit(std::vector<Demotion>* demotions);
  void AdvanceHistoryEnd();
  void SetRetained(uint32_t first_page, uint32_t end_page);
  void ReturnBf16(Entry* page);

  const Shape shape_;
  GpuPageSource* const source_;
  std::vector<SharedPage> shared_;
  std::vector<Entry> pages_;
  std::vector<const std::byte*> history_;
  size_t num_adopted_history_ = 0;
  uint32_t history_end_page_ = 0;  // Pages of [sink, here) are in history.
  uint32_t retained_first_ = 0;
  uint32_t retained_end_ = 0;

  // Of the step that is reserved.
  bool has_step_ = false;
  uint32_t pages_before_ = 0;
  std::vector<Demotion> overdue_;
  std::vector<Demotion> due_;
  std::vector<std::byte*> taken_;  // Scratch.
};

}  // namespace crumb
