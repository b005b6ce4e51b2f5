// SPDX-License-Identifier: Apache-2.0
//
// Checks that the page ops' parameters share. INVALID_ARGUMENT names the field, its value and the
// limit.
#pragma once

#include <string_view>

#include "absl/status/status.h"

#include "crumb/cuda/demote_pages.h"
#include "crumb/cuda/shared_decode.h"

namespace crumb::gpu {

// Not null, and a multiple of `alignment`.
absl::Status CheckPointer(std::string_view name, const void* pointer, size_t alignment);

// A multiple of 16.
absl::Status CheckStride(std::string_view name, size_t bytes);

absl::Status CheckHeads(const DeviceHeads& heads);

// [first, first + count) within `limit`, not empty.
absl::Status CheckRange(std::string_view name, uint32_t first, uint32_t count, uint32_t limit);

struct AttentionShape {
  uint32_t num_query_heads;
  uint32_t num_kv_heads;
  uint32_t head_dim;
  float scale;
};
// A whole group of query heads for each KV head, at most `max_group`; a head_dim that has kernels.
absl::Status CheckAttention(const AttentionShape& shape, uint32_t max_group);

// What SharedDecodeWorkspaceBytes computes with: sequences, heads, the prefix's stride.
absl::Status CheckSharedShape(const SharedDecodeParams& params);

absl::Status CheckRows(std::string_view name, const DeviceRows& rows);
absl::Status CheckBlocks(std::string_view name,
                         const void* pages,
                         size_t offset,
                         size_t layer_stride,
                         size_t head_stride);

}  // namespace crumb::gpu
