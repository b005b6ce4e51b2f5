// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/split_decode.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cuda/reference/element.h"
#include "cuda/reference/split_attention.h"
#include "proto/base/bfloat16.h"
#include "proto/base/status_macros.h"
#include "proto/page/page_format.h"

namespace crumb {
namespace {

const std::byte* BlockOf(const DevicePageTable& table,
                         uint32_t sequence,
                         uint32_t page,
                         uint32_t kv_head) {
  const std::byte* image = table.pages[size_t{sequence} * table.stride + page];
  return image == nullptr ? nullptr : image + table.block_offset + kv_head * table.head_stride;
}

// One pair of sequence and KV head, by the twin of split attention.
class PairReference {
 public:
  PairReference(const SplitDecodeParams& params, uint32_t sequence, uint32_t kv_head)
      : params_(params),
        group_(params.num_query_heads / params.num_kv_heads),
        first_row_(size_t{sequence} * params.num_query_heads + size_t{kv_head} * group_) {
    FindHistory(sequence, kv_head);
    FindWindows(sequence, kv_head);
  }

  void Run() const {
    const size_t dim = params_.head_dim;
    std::vector<float> queries(group_ * dim);
    for (size_t i = 0; i < queries.size(); ++i) {
      queries[i] = LoadElement(params_.queries, first_row_ * dim + i, params_.query_type);
    }
    std::vector<float> out(group_ * dim, 0.0f);
    std::vector<float> lse(group_, -std::numeric_limits<float>::infinity());
    if (!history_.empty() || !windows_.empty()) {
      reference::SplitAttention({.key_dim = params_.head_dim,
                                 .value_dim = params_.head_dim,
                                 .num_queries = 1,
                                 .group = group_,
                                 .scale = params_.scale,
                                 .queries = queries.data(),
                                 .history = history_,
                                 .windows = windows_,
                                 .out = out.data(),
                                 .lse = lse.data()});
    }
    for (size_t i = 0; i < out.size(); ++i) {
      StoreElement(params_.out, first_row_ * dim + i, params_.out_type, out[i]);
    }
    if (params_.lse != nullptr) {
      std::copy(lse.begin(), lse.end(), params_.lse + first_row_);
    }
  }

 private:
  void FindHistory(uint32_t sequence, uint32_t kv_head) {
    const DevicePageTable& table = params_.history;
    const uint32_t pages =
        table.stride == 0 ? 0 : std::min(params_.history_pages[sequence], table.stride);
    for (uint32_t page = 0; page < pages; ++page) {
      if (const std::byte* block = BlockOf(table, sequence, page, kv_head)) {
        history_.push_back(block);
      }
    }
  }

  void FindWindows(uint32_t sequence, uint32_t kv_head) {
    const DevicePageTable& table = params_.windows;
    const uint32_t tokens =
        table.stride == 0 ? 0
                          : std::min(params_.window_tokens[sequence], table.stride * kPageTokens);
    const Bf16HeadBlock format{params_.head_dim, params_.head_dim};
    for (uint32_t page = 0; page * kPageTokens < tokens; ++page) {
      if (const std::byte* block = BlockOf(table, sequence, page, kv_head)) {
        windows_.push_back({reinterpret_cast<const BFloat16*>(block + format.key_offset()),
                            reinterpret_cast<const BFloat16*>(block + format.value_offset()),
                            std::min(tokens - page * kPageTokens, kPageTokens)});
      }
    }
  }

  const SplitDecodeParams& params_;
  const uint32_t group_;
  const size_t first_row_;
  std::vector<const std::byte*> history_;
  std::vector<Bf16Rows> windows_;
};

}  // namespace

absl::Status SplitDecodeReference(const SplitDecodeParams& params) {
  CRUMB_RETURN_IF_ERROR(ValidateSplitDecode(params));
  for (uint32_t sequence = 0; sequence < params.num_sequences; ++sequence) {
    for (uint32_t kv_head = 0; kv_head < params.num_kv_heads; ++kv_head) {
      PairReference(params, sequence, kv_head).Run();
    }
  }
  return absl::OkStatus();
}

}  // namespace crumb
