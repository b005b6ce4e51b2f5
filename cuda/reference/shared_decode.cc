// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/shared_decode.h"

#include <algorithm>
#include <vector>

#include "crumb/cuda/split_decode.h"
#include "proto/base/status_macros.h"

namespace crumb {

// What a shared prefix means: as if each sequence had its pages first in its own history.
absl::Status SharedDecodeReference(const SharedDecodeParams& params) {
  CRUMB_RETURN_IF_ERROR(ValidateSharedDecode(params));
  SplitDecodeParams whole = params.batch;
  const DevicePageTable& own = params.batch.history;
  const uint32_t shared = std::min(*params.prefix_pages, params.prefix.stride);
  whole.history.stride = shared + own.stride;
  std::vector<const std::byte*> table(size_t{whole.num_sequences} * whole.history.stride, nullptr);
  std::vector<uint32_t> pages(whole.num_sequences, shared);
  for (uint32_t sequence = 0; sequence < whole.num_sequences; ++sequence) {
    const std::byte** row = &table[size_t{sequence} * whole.history.stride];
    std::copy_n(params.prefix.pages, shared, row);
    if (own.stride > 0) {
      std::copy_n(own.pages + size_t{sequence} * own.stride, own.stride, row + shared);
      pages[sequence] += std::min(params.batch.history_pages[sequence], own.stride);
    }
  }
  whole.history.pages = table.data();
  whole.history.block_offset = params.prefix.block_offset;
  whole.history.head_stride = params.prefix.head_stride;
  whole.history_pages = pages.data();
  return SplitDecodeReference(whole);
}

}  // namespace crumb
