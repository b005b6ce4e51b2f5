// SPDX-License-Identifier: Apache-2.0
#include "absl/strings/str_cat.h"

#include "crumb/cuda/shared_decode.h"
#include "crumb/cuda/split_decode.h"
#include "cuda/gpu/check_params.h"
#include "cuda/launch/shared_prefix.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

constexpr uint32_t kMaxSequences = 1u << 20;
constexpr uint32_t kMaxGroup = 16;
constexpr size_t kAlignment = 16;
constexpr size_t kWorkspaceAlignment = 256;

absl::Status CheckBatch(const SplitDecodeParams& params) {
  if (params.num_sequences == 0 || params.num_sequences > kMaxSequences) {
    return absl::InvalidArgumentError(absl::StrCat("num_sequences is ", params.num_sequences,
                                                   "; it must be from 1 to ", kMaxSequences));
  }
  return gpu::CheckAttention(
      {params.num_query_heads, params.num_kv_heads, params.head_dim, params.scale}, kMaxGroup);
}

// Blocks of rows are a grid's second dimension.
constexpr uint32_t kMaxRowBlocks = 65535;

// Units of work of a sequence are counted in 31 bits: a page of history is one, a page of windows
// eight. Rows of windows are counted in 32.
constexpr uint32_t kMaxHistory = 1u << 28;
constexpr uint32_t kMaxWindows = 1u << 25;

absl::Status CheckTable(const char* name,
                        const DevicePageTable& table,
                        uint32_t max_stride,
                        const char* lengths_name,
                        const uint32_t* lengths) {
  if (table.stride == 0) {
    return absl::OkStatus();
  }
  if (table.stride > max_stride) {
    return absl::InvalidArgumentError(absl::StrCat(name, ".stride is ", table.stride,
                                                   "; it must be at most ", max_stride, " pages"));
  }
  CRUMB_RETURN_IF_ERROR(gpu::CheckPointer(absl::StrCat(name, ".pages"), table.pages, 8));
  CRUMB_RETURN_IF_ERROR(gpu::CheckPointer(lengths_name, lengths, 4));
  if (table.block_offset % kAlignment != 0 || table.head_stride % kAlignment != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, ".block_offset is ", table.block_offset, " and .head_stride ", table.head_stride,
        "; head blocks are aligned to ", kAlignment, " bytes, so both must be multiples of it"));
  }
  return absl::OkStatus();
}

absl::Status CheckTypes(const SplitDecodeParams& params) {
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

}  // namespace

absl::Status ValidateSplitDecode(const SplitDecodeParams& params) {
  CRUMB_RETURN_IF_ERROR(CheckBatch(params));
  CRUMB_RETURN_IF_ERROR(CheckTypes(params));
  CRUMB_RETURN_IF_ERROR(gpu::CheckPointer("queries", params.queries, kAlignment));
  CRUMB_RETURN_IF_ERROR(gpu::CheckPointer("out", params.out, kAlignment));
  if (params.lse != nullptr) {
    CRUMB_RETURN_IF_ERROR(gpu::CheckPointer("lse", params.lse, 4));
  }
  CRUMB_RETURN_IF_ERROR(
      CheckTable("history", params.history, kMaxHistory, "history_pages", params.history_pages));
  CRUMB_RETURN_IF_ERROR(
      CheckTable("windows", params.windows, kMaxWindows, "window_tokens", params.window_tokens));
  return gpu::CheckPointer("workspace", params.workspace, kWorkspaceAlignment);
}

absl::Status gpu::CheckSharedShape(const SharedDecodeParams& params) {
  const SplitDecodeParams& batch = params.batch;
  CRUMB_RETURN_IF_ERROR(CheckBatch(batch));
  const uint32_t group = batch.num_query_heads / batch.num_kv_heads;
  if (batch.num_sequences > kMaxRowBlocks * kPrefixBlockRows / group) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_sequences is ", batch.num_sequences, "; with ", group,
                     " query heads a KV head a prefix may be shared by at most ",
                     kMaxRowBlocks * kPrefixBlockRows / group));
  }
  if (params.prefix.stride == 0) {
    return absl::InvalidArgumentError(
        "prefix.stride is 0; a shared prefix has at least one page: use SplitDecode without one");
  }
  return absl::OkStatus();
}

absl::Status ValidateSharedDecode(const SharedDecodeParams& params) {
  CRUMB_RETURN_IF_ERROR(gpu::CheckSharedShape(params));
  CRUMB_RETURN_IF_ERROR(ValidateSplitDecode(params.batch));
  const DevicePageTable& own = params.batch.history;
  if (own.stride > 0 && (own.block_offset != params.prefix.block_offset ||
                         own.head_stride != params.prefix.head_stride)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "prefix has block_offset ", params.prefix.block_offset, " and head_stride ",
        params.prefix.head_stride, ", batch.history ", own.block_offset, " and ", own.head_stride,
        "; both are pages of one layer of one model, so they must be the same"));
  }
  return CheckTable("prefix", params.prefix, kMaxHistory, "prefix_pages", params.prefix_pages);
}

}  // namespace crumb
