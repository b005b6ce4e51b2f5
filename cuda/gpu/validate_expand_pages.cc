// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "absl/strings/str_cat.h"

#include "crumb/cuda/expand_pages.h"
#include "cuda/gpu/check_params.h"
#include "proto/base/status_macros.h"
#include "proto/page/page_format.h"

namespace crumb {
namespace {

absl::Status CheckPagedRows(const char* name, const DevicePagedRows& rows) {
  const auto named = [&](const char* field) { return absl::StrCat(name, field); };
  CRUMB_RETURN_IF_ERROR(gpu::CheckPointer(named(".layers"), rows.layers, alignof(void*)));
  CRUMB_RETURN_IF_ERROR(gpu::CheckStride(named(".offset"), rows.offset));
  CRUMB_RETURN_IF_ERROR(gpu::CheckStride(named(".block_stride"), rows.block_stride));
  CRUMB_RETURN_IF_ERROR(gpu::CheckStride(named(".token_stride"), rows.token_stride));
  return gpu::CheckStride(named(".head_stride"), rows.head_stride);
}

absl::Status CheckTokens(const ExpandPagesParams& params) {
  const uint64_t limit = uint64_t{params.num_pages} * kPageTokens;
  if (params.num_tokens == 0 || params.num_tokens > limit) {
    return absl::InvalidArgumentError(absl::StrCat("num_tokens is ", params.num_tokens,
                                                   "; it must be from 1 to ", limit, ", those of ",
                                                   params.num_pages, " pages"));
  }
  if (uint64_t{params.first_position} + params.num_tokens > (uint64_t{1} << 32)) {
    return absl::InvalidArgumentError(absl::StrCat("first_position is ", params.first_position,
                                                   "; with ", params.num_tokens,
                                                   " tokens it must end below 4294967296"));
  }
  if (params.block_tokens == 0) {
    return absl::InvalidArgumentError(
        "block_tokens is 0; it must be the number of tokens of a block of the engine's cache");
  }
  if (params.num_blocks == 0) {
    return absl::InvalidArgumentError(
        "num_blocks is 0; it must be the number of blocks of the engine's cache");
  }
  return gpu::CheckPointer("block_table", params.block_table, alignof(int32_t));
}

}  // namespace

absl::Status ValidateExpandPages(const ExpandPagesParams& params) {
  CRUMB_RETURN_IF_ERROR(gpu::CheckHeads(params.heads));
  CRUMB_RETURN_IF_ERROR(gpu::CheckRange("num_layers", params.first_layer, params.num_layers,
                                        params.heads.num_layers));
  CRUMB_RETURN_IF_ERROR(
      gpu::CheckRange("num_heads", params.first_head, params.num_heads, params.heads.num_kv_heads));
  // Units of work, K and V of a head block each, are counted in 31 bits.
  const uint32_t most = (1u << 30) / (params.num_layers * params.num_heads);
  CRUMB_RETURN_IF_ERROR(gpu::CheckRange("num_pages", 0, params.num_pages, most));
  CRUMB_RETURN_IF_ERROR(gpu::CheckBlocks("int2", params.int2.pages, params.int2.offset,
                                         params.int2.layer_stride, params.int2.head_stride));
  CRUMB_RETURN_IF_ERROR(CheckTokens(params));
  CRUMB_RETURN_IF_ERROR(CheckPagedRows("keys", params.keys));
  CRUMB_RETURN_IF_ERROR(CheckPagedRows("values", params.values));
  return gpu::CheckPointer("rows_left_out", params.rows_left_out, alignof(uint64_t));
}

}  // namespace crumb
