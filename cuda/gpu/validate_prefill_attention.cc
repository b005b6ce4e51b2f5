// SPDX-License-Identifier: Apache-2.0
#include "absl/strings/str_cat.h"

#include "crumb/cuda/prefill_attention.h"
#include "cuda/gpu/check_params.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

constexpr uint32_t kMaxQueries = 1u << 20;
constexpr uint32_t kMaxGroup = 64;
constexpr uint32_t kMaxPages = 1u << 24;

absl::Status CheckHeads(const PrefillAttentionParams& params) {
  CRUMB_RETURN_IF_ERROR(gpu::CheckAttention(
      {params.num_query_heads, params.num_kv_heads, params.head_dim, params.scale}, kMaxGroup));
  if (params.query_type != ElementType::kBf16 && params.query_type != ElementType::kFp16) {
    return absl::InvalidArgumentError(
        absl::StrCat("query_type is ", params.query_type, "; it must be kBf16 (1) or kFp16 (2)"));
  }
  if (params.out_type != ElementType::kBf16 && params.out_type != ElementType::kFp16 &&
      params.out_type != ElementType::kFloat32) {
    return absl::InvalidArgumentError(absl::StrCat(
        "out_type is ", params.out_type, "; it must be kBf16 (1), kFp16 (2) or kFloat32 (3)"));
  }
  return absl::OkStatus();
}

absl::Status CheckTable(const char* name, const DevicePageTable& table) {
  CRUMB_RETURN_IF_ERROR(gpu::CheckRange(absl::StrCat(name, ".stride"), 0, table.stride, kMaxPages));
  return gpu::CheckBlocks(name, table.pages, table.block_offset, 0, table.head_stride);
}

absl::Status CheckLengths(const PrefillAttentionParams& params) {
  if (params.history_pages > params.history.stride) {
    return absl::InvalidArgumentError(absl::StrCat("history_pages is ", params.history_pages,
                                                   "; it must be at most history.stride, ",
                                                   params.history.stride));
  }
  const uint64_t rows = uint64_t{params.windows.stride} * kPageTokens;
  if (params.window_tokens < params.num_queries || params.window_tokens > rows) {
    return absl::InvalidArgumentError(
        absl::StrCat("window_tokens is ", params.window_tokens, "; it must be from num_queries, ",
                     params.num_queries, ", to the rows of the windows' pages, ", rows));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidatePrefillAttention(const PrefillAttentionParams& params) {
  CRUMB_RETURN_IF_ERROR(gpu::CheckRange("num_queries", 0, params.num_queries, kMaxQueries));
  CRUMB_RETURN_IF_ERROR(CheckHeads(params));
  CRUMB_RETURN_IF_ERROR(gpu::CheckPointer("queries", params.queries, 16));
  CRUMB_RETURN_IF_ERROR(gpu::CheckPointer("out", params.out, 16));
  if (params.lse != nullptr) {
    CRUMB_RETURN_IF_ERROR(gpu::CheckPointer("lse", params.lse, alignof(float)));
  }
  if (params.null_pages != nullptr) {
    CRUMB_RETURN_IF_ERROR(gpu::CheckPointer("null_pages", params.null_pages, alignof(uint64_t)));
  }
  if (params.history.stride > 0) {
    CRUMB_RETURN_IF_ERROR(CheckTable("history", params.history));
  }
  CRUMB_RETURN_IF_ERROR(CheckTable("windows", params.windows));
  return CheckLengths(params);
}

}  // namespace crumb
