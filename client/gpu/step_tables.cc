// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/step_tables.h"

#include <algorithm>

#include "proto/base/check.h"
#include "proto/page/page_format.h"

namespace crumb {

size_t StepTables::WindowsOffset(const Shape& shape) {
  const size_t words = size_t{3} * shape.max_rows + size_t{2} * shape.max_tokens + 1;
  return (words * sizeof(uint32_t) + alignof(void*) - 1) / alignof(void*) * alignof(void*);
}

size_t StepTables::HistoryOffset(const Shape& shape) {
  return WindowsOffset(shape) + sizeof(void*) * shape.max_rows * shape.window_stride;
}

size_t StepTables::Bytes(const Shape& shape) {
  return HistoryOffset(shape) + sizeof(void*) * (shape.max_rows + size_t{1}) * shape.history_stride;
}

StepTables::StepTables(const Shape& shape, std::byte* image)
    : shape_(shape), image_(image), known_(shape.max_rows) {
  CRUMB_CHECK(shape.max_tokens >= shape.max_rows, "a row has a token");
  std::fill_n(image, Bytes(shape), std::byte{0});
  ranges_.reserve(size_t{2} + size_t{2} * shape.max_rows);
}

void StepTables::Begin(std::span<const std::byte* const> prefix) {
  CRUMB_CHECK(prefix.size() <= shape_.history_stride, "the caller has checked the limits");
  num_rows_ = 0;
  num_tokens_ = 0;
  ranges_.clear();
  prefix_pages_ = prefix.size();
  *At<uint32_t>(prefix_pages_offset()) = static_cast<uint32_t>(prefix.size());
  const auto image = At<const std::byte*>(prefix_offset());
  // Comparing some thousand addresses is nothing beside knowing whose they were.
  if (prefix.size() > known_prefix_pages_ || !std::equal(prefix.begin(), prefix.end(), image)) {
    std::copy(prefix.begin(), prefix.end(), image);
    ranges_.push_back({prefix_offset(), prefix.size() * sizeof(void*)});
    known_prefix_pages_ = prefix.size();
  }
}

void StepTables::Add(const Row& row) {
  CRUMB_CHECK(num_rows_ < shape_.max_rows && row.num_tokens <= shape_.max_tokens - num_tokens_ &&
                  row.adopted_history.size() + row.own_history.size() <= shape_.history_stride &&
                  row.windows.size() <= shape_.window_stride,
              "the caller has checked the limits");
  const uint32_t index = num_rows_++;
  // All pages of the windows are full but the last, and the last pages are all there.
  const auto window_rows = static_cast<uint32_t>(row.windows.size()) * kPageTokens;
  const uint32_t before_windows = row.num_pages * kPageTokens - window_rows;
  At<uint32_t>(window_tokens_offset())[index] = row.length + row.num_tokens - before_windows;
  const size_t history_pages = row.adopted_history.size() + row.own_history.size();
  At<uint32_t>(history_pages_offset())[index] = static_cast<uint32_t>(history_pages);
  At<uint32_t>(own_pages_offset())[index] =
      static_cast<uint32_t>(prefix_pages_ > 0 ? row.own_history.size() : history_pages);
  std::copy(row.windows.begin(), row.windows.end(), At<const std::byte*>(windows_offset(index)));
  for (uint32_t i = 0; i < row.num_tokens; ++i, ++num_tokens_) {
    At<uint32_t>(slots_offset())[num_tokens_] = row.length + i - before_windows;
    At<uint32_t>(token_rows_offset())[num_tokens_] = index;
  }

  WriteHistory(index, row);
}

void StepTables::WriteHistory(uint32_t index, const Row& row) {
  const size_t adopted = row.adopted_history.size();
  const size_t own = row.own_history.size();
  auto* const pages = At<const std::byte*>(history_offset(index));
  Known& known = known_[index];
  if (known.sequence_id != row.sequence_id) {
    std::copy(row.own_history.begin(), row.own_history.end(), pages);
    std::copy(row.adopted_history.begin(), row.adopted_history.end(), pages + own);
    AddRange(index, 0, own + adopted);
  } else if (known.own_pages < own) {
    for (size_t page = known.own_pages; page < own; ++page) {
      pages[page + adopted] = pages[page];
      pages[page] = row.own_history[page];
    }
    AddRange(index, known.own_pages, own);
    AddRange(index, std::max(own, known.own_pages + adopted), own + adopted);
  }
  known = {row.sequence_id, own};
}

void StepTables::AddRange(uint32_t index, size_t first, size_t end) {
  if (first < end) {
    ranges_.push_back(
        {history_offset(index) + first * sizeof(void*), (end - first) * sizeof(void*)});
  }
}

std::span<const StepTables::Range> StepTables::Finish() {
  for (uint32_t row = num_rows_; row < shape_.max_rows; ++row) {
    At<uint32_t>(window_tokens_offset())[row] = 0;
    At<uint32_t>(history_pages_offset())[row] = 0;
    At<uint32_t>(own_pages_offset())[row] = 0;
  }
  for (uint32_t token = num_tokens_; token < shape_.max_rows; ++token) {
    At<uint32_t>(slots_offset())[token] = AppendRowsParams::kNoSlot;
    At<uint32_t>(token_rows_offset())[token] = token;
  }
  ranges_.push_back({0, windows_offset(num_rows_)});
  return ranges_;
}

void StepTables::Forget() {
  std::fill(known_.begin(), known_.end(), Known{});
  known_prefix_pages_ = 0;
}

}  // namespace crumb
