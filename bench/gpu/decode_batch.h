// SPDX-License-Identifier: Apache-2.0
//
// A batch of sequences of one length in device memory, as an engine would have them: page images of
// all layers, [kv_head][layer], in random order. Each layer is another buffer for its launch, so
// that no cache holds what the next launch reads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "crumb/cuda/decode_params.h"
#include "proto/page/geometry.h"

namespace crumb::bench {

struct BatchShape {
  uint32_t num_sequences = 1;
  uint32_t history_tokens = 0;  // Of each, whole pages; INT2.
  uint32_t window_tokens = 0;   // Of each; BF16.
  uint32_t shared_tokens = 0;   // Of history: the first ones, which all sequences have in common.
  Geometry geometry = {36, 8, 128, 128};
  uint32_t num_query_heads = 32;
};

class DecodeBatch {
 public:
  explicit DecodeBatch(const BatchShape& shape);
  ~DecodeBatch();
  DecodeBatch(const DecodeBatch&) = delete;
  DecodeBatch& operator=(const DecodeBatch&) = delete;

  const BatchShape& shape() const { return shape_; }
  // Parameters of one layer's launch.
  SplitDecodeParams Params(uint32_t layer) const;
  // Numbers of pages on the device: that all share [1], and that each has besides [num_sequences].
  const uint32_t* prefix_pages() const { return prefix_pages_; }
  const uint32_t* own_pages() const { return own_pages_; }
  // What one launch must read: INT2 of every sequence, and BF16.
  double HistoryBytes() const;
  double WindowBytes() const;

 private:
  template <typename T>
  T* Allocate(size_t count);

  BatchShape shape_;
  SplitDecodeParams params_;
  const uint32_t* prefix_pages_ = nullptr;
  const uint32_t* own_pages_ = nullptr;
  static constexpr int kMaxAllocations = 16;
  void* allocations_[kMaxAllocations] = {};
  int num_allocations_ = 0;
};

}  // namespace crumb::bench
