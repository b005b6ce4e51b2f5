// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/expand_pages.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cuda/reference/expand.h"
#include "cuda/reference/expand_problem.h"
#include "proto/page/page_format.h"

namespace crumb {
namespace {

// One head's rows of one page to their places; the number that have none, or no page: no `rows`.
uint64_t Scatter(const ExpandPagesParams& params,
                 const DevicePagedRows& to,
                 const BFloat16* rows,
                 uint32_t page,
                 uint32_t layer,
                 uint32_t head) {
  const uint32_t dim = params.heads.head_dim;
  uint64_t left_out = 0;
  for (uint32_t row = 0; row < kPageTokens; ++row) {
    const uint32_t token = page * kPageTokens + row;
    if (token >= params.num_tokens) {
      break;
    }
    const uint32_t position = params.first_position + token;
    const int32_t block = params.block_table[position / params.block_tokens];
    if (rows == nullptr || to.layers[layer] == nullptr || block < 0 ||
        static_cast<uint32_t>(block) >= params.num_blocks) {
      ++left_out;
      continue;
    }
    std::byte* target = to.layers[layer] + to.offset +
                        static_cast<size_t>(block) * to.block_stride +
                        position % params.block_tokens * to.token_stride + head * to.head_stride;
    std::memcpy(target, rows + size_t{row} * dim, dim * sizeof(BFloat16));
  }
  return left_out;
}

}  // namespace

absl::Status ExpandPagesReference(const ExpandPagesParams& params,
                                  std::span<const HeadParameters> heads) {
  const uint32_t dim = params.heads.head_dim;
  std::vector<BFloat16> keys(size_t{kPageTokens} * dim);
  std::vector<BFloat16> values(keys.size());
  const uint32_t pages = (params.num_tokens + kPageTokens - 1) / kPageTokens;
  uint64_t left_out = 0;
  for (uint32_t page = 0; page < pages; ++page) {
    for (uint32_t layer = 0; layer < params.num_layers; ++layer) {
      for (uint32_t head = 0; head < params.num_heads; ++head) {
        const std::byte* image = params.int2.pages[page];
        if (image == nullptr) {
          left_out += Scatter(params, params.keys, nullptr, page, layer, head);
          left_out += Scatter(params, params.values, nullptr, page, layer, head);
          continue;
        }
        const std::byte* block = image + params.int2.offset + layer * params.int2.layer_stride +
                                 head * params.int2.head_stride;
        reference::ExpandHeadBlock(
            heads[size_t{params.first_layer + layer} * params.heads.num_kv_heads +
                  params.first_head + head],
            {block, Int2HeadBlock{dim, dim}.bytes()}, params.space, keys, values);
        left_out += Scatter(params, params.keys, keys.data(), page, layer, head);
        left_out += Scatter(params, params.values, values.data(), page, layer, head);
      }
    }
  }
  return gpu::CheckRowsLeftOut(params, left_out);
}

}  // namespace crumb
