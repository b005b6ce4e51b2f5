// SPDX-License-Identifier: Apache-2.0
//
// Counts the null pages of a launch of prefill attention, apart from the pipeline that reads them:
// the first block looks through both tables before it begins.
#pragma once

#include <cstdint>

#include "crumb/cuda/prefill_attention.h"
#include "proto/page/page_format.h"

namespace crumb::gpu {

// By all threads of the grid.
__device__ __forceinline__ void CountNullPages(const PrefillAttentionParams& params) {
  if (params.null_pages == nullptr || blockIdx.x != 0 || blockIdx.y != 0) {
    return;
  }
  const uint32_t num_windows = (params.window_tokens + kPageTokens - 1) / kPageTokens;
  uint32_t count = 0;
  for (uint32_t page = threadIdx.x; page < params.history_pages; page += blockDim.x) {
    count += params.history.pages[page] == nullptr ? 1 : 0;
  }
  for (uint32_t page = threadIdx.x; page < num_windows; page += blockDim.x) {
    count += params.windows.pages[page] == nullptr ? 1 : 0;
  }
  if (count > 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(params.null_pages),
              static_cast<unsigned long long>(count));
  }
}

}  // namespace crumb::gpu
