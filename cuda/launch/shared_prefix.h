// SPDX-License-Identifier: Apache-2.0
//
// Launches of shared decode's two own kernels. Plain C++ for callers that have no CUDA headers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "crumb/cuda/decode_params.h"

struct CUstream_st;

namespace crumb::gpu {

struct SharedPrefixLaunch {
  SplitDecodeParams batch;
  DevicePageTable prefix;
  const uint32_t* prefix_pages = nullptr;
  uint32_t num_splits = 0;  // Of the prefix, each by a block of its own.

  // [num_parts, num_rows, head_dim] f32, relative to the part's base, and [num_parts, num_rows] of
  // (base, sum), in base-2 exponents; a sum of 0: nothing there. Parts are splits, or
  // PrefixPartsOfSplit times as many.
  float* outputs = nullptr;
  float* sums = nullptr;
  // What split decode made of the sequences' own parts.
  const float* own_outputs = nullptr;  // [num_rows, head_dim]
  const float* own_lse = nullptr;      // [num_rows]
};

// Rows of queries that a block takes at once.
inline constexpr uint32_t kPrefixBlockRows = 128;

// Parts that a split has of row `row` of a KV head's `num_rows`: two where the block's warpgroups
// take turns with pages. The last rows have the most.
constexpr uint32_t PrefixPartsOfSplit(uint32_t head_dim, uint32_t num_rows, uint32_t row) {
  const uint32_t rows_of_block = num_rows - row / kPrefixBlockRows * kPrefixBlockRows;
  return head_dim < 256 && rows_of_block <= kPrefixBlockRows / 2 ? 2 : 1;
}

// Enqueue; parameters are valid. Return a cudaError_t. Both may start while the launch before them
// runs. The first lets the next one start once it has waited for what is before.
int LaunchSharedPrefix(const SharedPrefixLaunch& launch, CUstream_st* stream);
int LaunchSharedMerge(const SharedPrefixLaunch& launch, CUstream_st* stream);

}  // namespace crumb::gpu
