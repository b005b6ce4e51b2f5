// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/split_attention.h"

#include <cmath>

#include "absl/strings/str_cat.h"

#include "cuda/reference/split_attention.h"
#include "proto/base/status_macros.h"
#include "proto/page/page_format.h"

namespace crumb {
namespace {

constexpr uint32_t kMaxGroup = 64;
constexpr uintptr_t kBlockAlignment = 16;

absl::Status CheckHeadDim(const char* name, uint32_t dim) {
  if (IsValidHeadDim(dim)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(name, " is ", dim, "; it must be a multiple of 32 from 32 to ", kMaxHeadDim));
}

absl::Status CheckWindows(const SplitAttentionParams& params) {
  uint64_t num_tokens = 0;
  for (size_t i = 0; i < params.windows.size(); ++i) {
    const Bf16Rows& rows = params.windows[i];
    if (rows.num_tokens > 0 && (rows.keys == nullptr || rows.values == nullptr)) {
      return absl::InvalidArgumentError(
          absl::StrCat("windows[", i, "] has ", rows.num_tokens, " tokens but a null ",
                       rows.keys == nullptr ? "keys" : "values", "; point it at their rows"));
    }
    num_tokens += rows.num_tokens;
  }
  if (params.num_queries == 0 || params.num_queries > num_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_queries is ", params.num_queries, "; it must be from 1 to the ",
                     num_tokens, " tokens of windows, whose last rows belong to the queries"));
  }
  return absl::OkStatus();
}

absl::Status Check(const SplitAttentionParams& params) {
  CRUMB_RETURN_IF_ERROR(CheckHeadDim("key_dim", params.key_dim));
  CRUMB_RETURN_IF_ERROR(CheckHeadDim("value_dim", params.value_dim));
  if (params.group == 0 || params.group > kMaxGroup) {
    return absl::InvalidArgumentError(absl::StrCat(
        "group is ", params.group, "; it must be from 1 to ", kMaxGroup, " query heads a KV head"));
  }
  if (!std::isfinite(params.scale)) {
    return absl::InvalidArgumentError(
        absl::StrCat("scale is ", params.scale, "; it must be finite, usually 1 / sqrt(key_dim)"));
  }
  if (params.queries == nullptr || params.out == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(params.queries == nullptr ? "queries" : "out",
                     " is null; it must point at num_queries * group rows"));
  }
  for (size_t i = 0; i < params.history.size(); ++i) {
    const auto address = reinterpret_cast<uintptr_t>(params.history[i]);
    if (address == 0 || address % kBlockAlignment != 0) {
      return absl::InvalidArgumentError(absl::StrCat("history[", i, "] is at address ", address,
                                                     "; a head block must be ", kBlockAlignment,
                                                     "-byte aligned and not null"));
    }
  }
  return CheckWindows(params);
}

}  // namespace

absl::Status SplitAttention(const SplitAttentionParams& params, CpuPath path) {
  CRUMB_RETURN_IF_ERROR(Check(params));
  static_cast<void>(path);
  reference::SplitAttention(params);
  return absl::OkStatus();
}

}  // namespace crumb
