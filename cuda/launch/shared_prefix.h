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

  // [num_splits, num_rows, head_dim] f32, relative to the split's maximum, and
  // [num_splits, num_rows] of (maximum, sum), in base-2 exponents; a sum of 0: nothing there.
  float* outputs = nullptr;
  float* sums = nullptr;
  // What split decode made of the sequences' own parts.
  const float* own_outputs = nullptr;  // [num_rows, head_dim]
  const float* own_lse = nullptr;      // [num_rows]
};

// Rows of queries that a block takes at once; 0: no kernel for this head_dim.
uint32_t SharedPrefixRows(uint32_t head_dim);

// Enqueue; parameters are valid. Return a cudaError_t.
int LaunchSharedPrefix(const SharedPrefixLaunch& launch, CUstream_st* stream);
int LaunchSharedMerge(const SharedPrefixLaunch& launch, CUstream_st* stream);

}  // namespace crumb::gpu
