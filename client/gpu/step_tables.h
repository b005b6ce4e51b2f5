// SPDX-License-Identifier: Apache-2.0
//
// What kernels read of a step, at addresses that never change: lengths, slots and page tables of a
// batch. This is the image in host memory from which the device's is brought up to date, and it
// knows what the device has already: of a row's history only what is new is copied, which in most
// steps is nothing.
//
//   one copy a step   [window_tokens: rows][history_pages: rows][own_pages: rows]
//                     [slots: tokens][rows: tokens][prefix_pages][windows: rows x window_stride]
//   as it changes     [history: rows x history_stride][prefix: history_stride]
//
// A row of history holds a sequence's own pages first and then those of its adopted prefix, so that
// kernels may read all of it (history_pages), or where all rows have one prefix, own_pages of it
// and the prefix once. Both are right in every step: without a common prefix own_pages are all, and
// prefix_pages is 0. The order of pages means nothing to attention, so an own page that comes takes
// the place of the first adopted one, which goes to the end.
//
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "crumb/cuda/append_rows.h"

namespace crumb {

class StepTables {
 public:
  struct Shape {
    uint32_t max_rows = 0;    // Sequences.
    uint32_t max_tokens = 0;  // At least max_rows.
    uint32_t history_stride = 0;
    uint32_t window_stride = 0;
  };
  // A part of the image that the device does not have.
  struct Range {
    size_t offset = 0;
    size_t bytes = 0;
  };
  struct Row {
    uint64_t sequence_id = 0;  // Never 0. Two sequences never have one id.
    uint32_t length = 0;       // Before the step.
    uint32_t num_tokens = 0;
    uint32_t num_pages = 0;  // With the step's tokens.
    // Together at most history_stride pages. Of one id, the first stays and the second only grows.
    std::span<const std::byte* const> adopted_history;
    std::span<const std::byte* const> own_history;
    std::span<const std::byte* const> windows;  // At most window_stride.
  };

  static size_t Bytes(const Shape& shape);
  // `image` has Bytes(shape) and outlives this. Aligned to 8 bytes.
  StepTables(const Shape& shape, std::byte* image);

  // A new step without rows. `prefix`: the adopted history of all rows, if it is the same.
  void Begin(std::span<const std::byte* const> prefix = {});
  // The next row and its tokens. At most max_rows and max_tokens in all.
  void Add(const Row& row);
  // Marks all further rows, and tokens up to max_rows, as padding, and says what to copy. Valid
  // until Begin; the image must not change before the copies were made.
  std::span<const Range> Finish();
  // The device may not have what Finish said: all of it is copied again next time.
  void Forget();

  uint32_t num_rows() const { return num_rows_; }
  uint32_t num_tokens() const { return num_tokens_; }

  // Offsets in the image, and so in the device's.
  static size_t window_tokens_offset() { return 0; }
  size_t history_pages_offset() const { return sizeof(uint32_t) * shape_.max_rows; }
  size_t own_pages_offset() const { return 2 * history_pages_offset(); }
  size_t slots_offset() const { return 3 * history_pages_offset(); }
  size_t token_rows_offset() const { return slots_offset() + sizeof(uint32_t) * shape_.max_tokens; }
  size_t prefix_pages_offset() const {
    return token_rows_offset() + sizeof(uint32_t) * shape_.max_tokens;
  }
  size_t windows_offset(uint32_t row = 0) const {
    return WindowsOffset(shape_) + sizeof(void*) * row * shape_.window_stride;
  }
  size_t history_offset(uint32_t row = 0) const {
    return HistoryOffset(shape_) + sizeof(void*) * row * shape_.history_stride;
  }
  size_t prefix_offset() const { return history_offset(shape_.max_rows); }

 private:
  // What the device's row of history holds.
  struct Known {
    uint64_t sequence_id = 0;
    size_t own_pages = 0;
  };

  static size_t WindowsOffset(const Shape& shape);
  static size_t HistoryOffset(const Shape& shape);
  void WriteHistory(uint32_t index, const Row& row);
  // Of a row's history, pages [first, end).
  void AddRange(uint32_t index, size_t first, size_t end);
  template <typename T>
  T* At(size_t offset) {
    return reinterpret_cast<T*>(image_ + offset);
  }

  const Shape shape_;
  std::byte* const image_;
  std::vector<Known> known_;
  size_t prefix_pages_ = 0;        // Of the step.
  size_t known_prefix_pages_ = 0;  // That the device has, as the image.
  uint32_t num_rows_ = 0;
  uint32_t num_tokens_ = 0;
  std::vector<Range> ranges_;
};

}  // namespace crumb
