// SPDX-License-Identifier: Apache-2.0
//
// New tokens for the tests of append_rows: a fused tensor of Q, K and V, slots anywhere in the
// windows of their sequences, some of them padding.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "crumb/cuda/append_rows.h"
#include "proto/base/float16.h"
#include "tests/cuda/gpu/page_scene.h"

namespace crumb {

struct AppendShape {
  uint32_t dim = 128;
  uint32_t num_kv_heads = 2;
  uint32_t group = 4;  // 0: no queries.
  uint32_t num_tokens = 1;
  ElementType type = ElementType::kBf16;
  CodecId codec = CodecId::kOscarInt2Aware;
};

class AppendScene {
 public:
  static constexpr uint32_t kStride = 3;  // Pages a sequence.
  static constexpr uint32_t kLayers = 2;

  explicit AppendScene(const AppendShape& shape)
      : shape_(shape),
        pages_({kLayers, shape.num_kv_heads, shape.dim, shape.dim},
               shape.codec,
               shape.num_tokens * kStride) {
    std::mt19937 random(shape.dim + shape.num_tokens);
    std::normal_distribution<float> normal(0, 2);
    rows_.resize(size_t{shape.num_tokens} * row_heads() * shape.dim);
    for (uint16_t& bits : rows_) {
      const float x = normal(random);
      bits = shape.type == ElementType::kFp16 ? Float16::FromFloat(x).bits
                                              : BFloat16::FromFloat(x).bits;
    }
    for (uint32_t token = 0; token < shape.num_tokens; ++token) {
      // Sequences in reverse, so that taking the token's own number for them shows.
      sequences_.push_back(shape.num_tokens - 1 - token);
      slots_.push_back(token % 5 == 3 ? AppendRowsParams::kNoSlot
                                      : static_cast<uint32_t>(random() % (kStride * kPageTokens)));
    }
  }

  const PageScene& pages() const { return pages_; }
  const std::vector<uint16_t>& rows() const { return rows_; }
  std::vector<uint32_t>& sequences() { return sequences_; }
  std::vector<uint32_t>& slots() { return slots_; }
  size_t query_elements() const {
    return size_t{shape_.num_tokens} * shape_.num_kv_heads * shape_.group * shape_.dim;
  }

  AppendRowsParams Params(uint32_t layer,
                          const uint16_t* rows,
                          uint16_t* queries,
                          std::byte* const* table,
                          const uint32_t* sequences,
                          const uint32_t* slots) const {
    const size_t row = size_t{2} * shape_.dim;
    const size_t token = row * row_heads();
    const auto* bytes = reinterpret_cast<const std::byte*>(rows);
    const uint32_t num_queries = shape_.num_kv_heads * shape_.group;
    AppendRowsParams params;
    params.heads.num_layers = kLayers;
    params.heads.num_kv_heads = shape_.num_kv_heads;
    params.heads.head_dim = shape_.dim;
    params.heads.is_aware = true;
    params.heads.is_tilted = shape_.codec == CodecId::kOscarInt2Tilted;
    params.layer = layer;
    params.num_kv_heads = shape_.num_kv_heads;
    params.num_query_heads = num_queries;
    params.num_tokens = shape_.num_tokens;
    params.type = shape_.type;
    params.queries = {bytes, token};
    params.keys = {bytes + num_queries * row, token};
    params.values = {bytes + (num_queries + shape_.num_kv_heads) * row, token};
    params.rotated_queries = queries;
    params.pages = table;
    params.num_sequences = shape_.num_tokens;
    params.stride = kStride;
    params.block_offset = pages_.geometry().HeadBlockOffset(PageEncoding::kBf16, layer, 0);
    params.head_stride = pages_.geometry().HeadRangeBytes(PageEncoding::kBf16);
    params.sequences = sequences;
    params.slots = slots;
    return params;
  }

 private:
  size_t row_heads() const { return size_t{shape_.num_kv_heads} * (shape_.group + 2); }

  const AppendShape shape_;
  const PageScene pages_;
  std::vector<uint16_t> rows_;  // [token][Q heads, K heads, V heads][dim]
  std::vector<uint32_t> sequences_;
  std::vector<uint32_t> slots_;
};

}  // namespace crumb
