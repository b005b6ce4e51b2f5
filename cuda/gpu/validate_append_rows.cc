// SPDX-License-Identifier: Apache-2.0
#include "absl/strings/str_cat.h"

#include "crumb/cuda/append_rows.h"
#include "cuda/gpu/check_params.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

constexpr size_t kAlignment = 16;

absl::Status CheckTokenRows(const char* name, const TokenRows& rows) {
  CRUMB_RETURN_IF_ERROR(gpu::CheckPointer(absl::StrCat(name, ".data"), rows.data, kAlignment));
  return gpu::CheckStride(absl::StrCat(name, ".token_stride"), rows.token_stride);
}

absl::Status CheckQueries(const AppendRowsParams& params) {
  if (params.num_query_heads == 0) {
    return absl::OkStatus();
  }
  constexpr uint32_t kMaxGroup = 64;
  const uint32_t group = params.num_query_heads / params.num_kv_heads;
  if (group == 0 || group > kMaxGroup || params.num_query_heads % params.num_kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "num_query_heads is ", params.num_query_heads, "; it must be a multiple of the ",
        params.num_kv_heads, " KV heads, 1 to ", kMaxGroup, " for each, or 0 for no queries"));
  }
  CRUMB_RETURN_IF_ERROR(CheckTokenRows("queries", params.queries));
  return gpu::CheckPointer("rotated_queries", params.rotated_queries, kAlignment);
}

absl::Status CheckTokens(const AppendRowsParams& params) {
  CRUMB_RETURN_IF_ERROR(CheckTokenRows("keys", params.keys));
  CRUMB_RETURN_IF_ERROR(CheckTokenRows("values", params.values));
  CRUMB_RETURN_IF_ERROR(gpu::CheckPointer("pages", params.pages, alignof(void*)));
  CRUMB_RETURN_IF_ERROR(gpu::CheckRange("num_sequences", 0, params.num_sequences, 1u << 20));
  CRUMB_RETURN_IF_ERROR(gpu::CheckRange("stride", 0, params.stride, 1u << 25));
  CRUMB_RETURN_IF_ERROR(gpu::CheckStride("block_offset", params.block_offset));
  CRUMB_RETURN_IF_ERROR(gpu::CheckStride("head_stride", params.head_stride));
  if (params.sequences != nullptr) {
    CRUMB_RETURN_IF_ERROR(gpu::CheckPointer("sequences", params.sequences, alignof(uint32_t)));
  }
  CRUMB_RETURN_IF_ERROR(gpu::CheckPointer("slots", params.slots, alignof(uint32_t)));
  return gpu::CheckPointer("tokens_left_out", params.tokens_left_out, alignof(uint64_t));
}

}  // namespace

absl::Status ValidateAppendRows(const AppendRowsParams& params) {
  CRUMB_RETURN_IF_ERROR(gpu::CheckHeads(params.heads));
  if (params.layer >= params.heads.num_layers) {
    return absl::InvalidArgumentError(absl::StrCat(
        "layer is ", params.layer, "; the profile has layers below ", params.heads.num_layers));
  }
  CRUMB_RETURN_IF_ERROR(gpu::CheckRange("num_kv_heads", params.first_head, params.num_kv_heads,
                                        params.heads.num_kv_heads));
  CRUMB_RETURN_IF_ERROR(gpu::CheckRange("num_tokens", 0, params.num_tokens, 1u << 15));
  if (params.type != ElementType::kBf16 && params.type != ElementType::kFp16) {
    return absl::InvalidArgumentError(
        absl::StrCat("type is ", params.type, "; it must be kBf16 (1) or kFp16 (2)"));
  }
  CRUMB_RETURN_IF_ERROR(CheckQueries(params));
  const bool has_only_queries =
      params.num_query_heads > 0 && params.keys.data == nullptr && params.values.data == nullptr;
  return has_only_queries ? absl::OkStatus() : CheckTokens(params);
}

}  // namespace crumb
