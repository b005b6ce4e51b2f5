// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/prefill_attention.h"

#include <algorithm>
#include <vector>

#include "cuda/reference/element.h"
#include "cuda/reference/split_attention.h"
#include "proto/base/bfloat16.h"
#include "proto/base/status_macros.h"
#include "proto/page/page_format.h"

namespace crumb {
namespace {

// One KV head, by the twin of split attention.
void AttendHead(const PrefillAttentionParams& params, uint32_t kv_head) {
  const uint32_t group = params.num_query_heads / params.num_kv_heads;
  const size_t dim = params.head_dim;
  const std::vector<std::byte> zeros(Bf16HeadBlock{params.head_dim, params.head_dim}.bytes());
  const auto block = [&](const DevicePageTable& table, uint32_t page) {
    return table.pages[page] == nullptr
               ? zeros.data()
               : table.pages[page] + table.block_offset + kv_head * table.head_stride;
  };
  std::vector<const std::byte*> history;
  for (uint32_t page = 0; page < params.history_pages; ++page) {
    history.push_back(block(params.history, page));
  }
  std::vector<Bf16Rows> windows;
  const Bf16HeadBlock format{params.head_dim, params.head_dim};
  for (uint32_t first = 0; first < params.window_tokens; first += kPageTokens) {
    const std::byte* rows = block(params.windows, first / kPageTokens);
    windows.push_back({reinterpret_cast<const BFloat16*>(rows + format.key_offset()),
                       reinterpret_cast<const BFloat16*>(rows + format.value_offset()),
                       std::min(params.window_tokens - first, kPageTokens)});
  }
  // Row (query, head of the group) of the twin is this row of queries, outputs and lse.
  const auto row_of = [&](size_t row) {
    return row / group * params.num_query_heads + size_t{kv_head} * group + row % group;
  };
  const size_t num_rows = size_t{params.num_queries} * group;
  std::vector<float> queries(num_rows * dim);
  std::vector<float> out(num_rows * dim);
  std::vector<float> lse(num_rows);
  for (size_t i = 0; i < queries.size(); ++i) {
    queries[i] = LoadElement(params.queries, row_of(i / dim) * dim + i % dim, params.query_type);
  }
  reference::SplitAttention({.key_dim = params.head_dim,
                             .value_dim = params.head_dim,
                             .num_queries = params.num_queries,
                             .group = group,
                             .scale = params.scale,
                             .queries = queries.data(),
                             .history = history,
                             .windows = windows,
                             .out = out.data(),
                             .lse = lse.data()});
  for (size_t i = 0; i < out.size(); ++i) {
    StoreElement(params.out, row_of(i / dim) * dim + i % dim, params.out_type, out[i]);
  }
  for (size_t row = 0; params.lse != nullptr && row < num_rows; ++row) {
    params.lse[row_of(row)] = lse[row];
  }
}

void CountNullPages(const PrefillAttentionParams& params) {
  if (params.null_pages != nullptr) {
    const auto* const windows = params.windows.pages;
    const uint32_t num_windows = (params.window_tokens + kPageTokens - 1) / kPageTokens;
    *params.null_pages += static_cast<uint64_t>(
        std::count(params.history.pages, params.history.pages + params.history_pages, nullptr) +
        std::count(windows, windows + num_windows, nullptr));
  }
}

}  // namespace

absl::Status PrefillAttentionReference(const PrefillAttentionParams& params) {
  CRUMB_RETURN_IF_ERROR(ValidatePrefillAttention(params));
  for (uint32_t kv_head = 0; kv_head < params.num_kv_heads; ++kv_head) {
    AttendHead(params, kv_head);
  }
  CountNullPages(params);
  return absl::OkStatus();
}

}  // namespace crumb
