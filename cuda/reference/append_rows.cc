// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/append_rows.h"

#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"

#include "cuda/reference/rotate.h"
#include "proto/base/bfloat16.h"
#include "proto/base/float16.h"
#include "proto/page/page_format.h"

namespace crumb {
namespace {

std::vector<float> Floats(const std::byte* row, ElementType type, uint32_t dim) {
  std::vector<float> floats(dim);
  for (uint32_t i = 0; i < dim; ++i) {
    uint16_t bits;
    std::memcpy(&bits, row + i * sizeof(bits), sizeof(bits));
    floats[i] = type == ElementType::kFp16 ? Float16{bits}.ToFloat() : BFloat16{bits}.ToFloat();
  }
  return floats;
}

void Store(const std::vector<float>& row, ElementType type, std::byte* out) {
  for (const float x : row) {
    const uint16_t bits =
        type == ElementType::kFp16 ? Float16::FromFloat(x).bits : BFloat16::FromFloat(x).bits;
    std::memcpy(out, &bits, sizeof(bits));
    out += sizeof(bits);
  }
}

const std::byte* RowOf(const TokenRows& rows, uint32_t token, uint32_t head, uint32_t dim) {
  return static_cast<const std::byte*>(rows.data) + token * rows.token_stride +
         size_t{head} * dim * 2;
}

std::byte* PageOf(const AppendRowsParams& params, uint32_t token) {
  const uint32_t sequence = params.sequences == nullptr ? token : params.sequences[token];
  const uint32_t page = params.slots[token] / kPageTokens;
  return sequence < params.num_sequences && page < params.stride
             ? params.pages[size_t{sequence} * params.stride + page]
             : nullptr;
}

}  // namespace

absl::Status AppendRowsReference(const AppendRowsParams& params,
                                 std::span<const HeadParameters> heads) {
  const uint32_t dim = params.heads.head_dim;
  const Bf16HeadBlock format{dim, dim};
  const size_t matrix = size_t{dim} * dim;
  const uint32_t group = params.num_query_heads / params.num_kv_heads;
  std::vector<float> out(dim);
  uint64_t left_out = 0;
  for (uint32_t token = 0; token < params.num_tokens; ++token) {
    const bool has_slot =
        params.keys.data != nullptr && params.slots[token] != AppendRowsParams::kNoSlot;
    std::byte* page = has_slot ? PageOf(params, token) : nullptr;
    left_out += has_slot && page == nullptr ? 1u : 0u;
    for (uint32_t kv = 0; kv < params.num_kv_heads; ++kv) {
      const HeadParameters& head =
          heads[size_t{params.layer} * params.heads.num_kv_heads + params.first_head + kv];
      for (uint32_t query = kv * group; query < (kv + 1) * group; ++query) {
        const float* rotation =
            head.query_rotation != nullptr ? head.query_rotation : head.key_rotation;
        reference::RotateRow(Floats(RowOf(params.queries, token, query, dim), params.type, dim), {},
                             {rotation, matrix}, out);
        Store(out, params.type,
              static_cast<std::byte*>(params.rotated_queries) +
                  (size_t{token} * params.num_query_heads + query) * dim * 2);
      }
      if (page == nullptr) {
        continue;
      }
      std::byte* block = page + params.block_offset + kv * params.head_stride +
                         size_t{params.slots[token] % kPageTokens} * dim * 2;
      reference::RotateRow(Floats(RowOf(params.keys, token, kv, dim), params.type, dim),
                           {head.key_mean, dim}, {head.key_rotation, matrix}, out);
      Store(out, ElementType::kBf16, block + format.key_offset());
      reference::RotateRow(Floats(RowOf(params.values, token, kv, dim), params.type, dim), {},
                           {head.value_rotation, matrix}, out);
      Store(out, ElementType::kBf16, block + format.value_offset());
    }
  }
  if (left_out > 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "left out ", left_out, " tokens whose sequence or slot is beyond the table of ",
        params.num_sequences, " sequences of ", params.stride,
        " pages, or whose page is null: give them pages, or kNoSlot where they are padding"));
  }
  return absl::OkStatus();
}

}  // namespace crumb
