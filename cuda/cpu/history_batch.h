// SPDX-License-Identifier: Apache-2.0
//
// What history_kernel.h keeps of the INT2 pages that it attends to together.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/cpu/split_attention_kernel.h"

namespace crumb::cpu {

// Pages read together. What comes between the products of keys and of values, and the adding of
// their sums to the outputs, is then paid once for all of them. Eight would not stay in the first
// cache until their values are read.
inline constexpr size_t kBatchPages = 4;

// One page against one chunk. Tokens are by position.
template <typename Simd>
struct alignas(64) HistoryPage {  // NOLINT(cppcoreguidelines-pro-type-member-init)
  const std::byte* block;
  const std::byte* ahead[2];  // Blocks to come, whose cache lines are fetched meanwhile.
  float max_key_scale;
  float max_value_scale;
  float max_value_min;  // Its absolute value.
  float key_scale[kPageTokens];
  float key_min[kPageTokens];
  float value_scale[kPageTokens];
  float value_min[kPageTokens];
  float scores[kChunkRows][kPageTokens];       // In the queries' unit.
  uint8_t digits[2][kChunkRows][kPageTokens];  // p * scale_v, by digit.
  typename Simd::Float highest[kChunkRows];    // Of the scores; lanes still to be combined.
};

// Some rows of a chunk.
struct HistoryRows {
  size_t count;
  size_t rows[kChunkRows];
};
inline constexpr HistoryRows kFirstRows[kChunkRows + 1] = {
    {0, {0, 1, 2, 3}}, {1, {0, 1, 2, 3}}, {2, {0, 1, 2, 3}}, {3, {0, 1, 2, 3}}, {4, {0, 1, 2, 3}}};

// Pages of a batch whose digits of p mean the same: all of them where no row is fine, else one.
struct HistoryGroup {                              // NOLINT(cppcoreguidelines-pro-type-member-init)
  alignas(64) float bases[ChunkState::kMaxLanes];  // Highest score of each row; p is 1 there.
  alignas(64) float growth[ChunkState::kMaxLanes];    // What that p is worth in the state.
  alignas(64) float units[2][ChunkState::kMaxLanes];  // What 1 of a digit is worth in the outputs.
  size_t first;
  size_t num_pages;
  float max_key_scale;
  float max_value_scale;
  float max_value_min;
  HistoryRows fine_rows;  // They need two digits.
  bool fine[kChunkRows];  // Whether a row is one of them.
};

// One batch against one chunk.
template <typename Simd>
struct alignas(64) HistoryBatch {  // NOLINT(cppcoreguidelines-pro-type-member-init)
  size_t key_dim;
  size_t value_dim;
  const FixedQueries* queries;
  ChunkState* state;
  float* outputs;
  size_t num_rows;
  size_t num_pages;
  size_t num_groups;
  HistoryPage<Simd> pages[kBatchPages];
  HistoryGroup groups[kBatchPages];
};

}  // namespace crumb::cpu
