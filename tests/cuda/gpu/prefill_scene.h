// SPDX-License-Identifier: Apache-2.0
//
// A chunk over a cached prefix for the tests of prefill attention: random pages in tables that are
// not in their order, and queries. A page image has two layers; the scene is the second.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "crumb/cuda/prefill_attention.h"
#include "tests/cuda/gpu/expand_scene.h"

namespace crumb {

struct PrefillShape {
  uint32_t dim = 128;
  uint32_t num_kv_heads = 2;
  uint32_t group = 4;
  uint32_t history_pages = 0;
  uint32_t window_tokens = 1;  // With the chunk.
  uint32_t num_queries = 1;
  // Of INT2 rows, what they are multiplied by; their scales and minima saturate as a page's do.
  float key_size = 1;
  float value_size = 1;
  ElementType query_type = ElementType::kBf16;
};

class PrefillScene {
 public:
  explicit PrefillScene(const PrefillShape& shape)
      : shape_(shape),
        geometry_{2, shape.num_kv_heads, shape.dim, shape.dim},
        window_pages_((shape.window_tokens + kPageTokens - 1) / kPageTokens),
        int2_(RandomInt2Pages(PageScene(geometry_, CodecId::kOscarInt2, shape.history_pages),
                              shape.dim + shape.num_queries)),
        windows_(GaussianRows(
            window_pages_ * geometry_.PageBytes(PageEncoding::kBf16) / 2, 1, shape.num_queries)),
        queries_(QueryBits(
            GaussianRows(size_t{shape.num_queries} * num_query_heads() * shape.dim, 1.5f, 7),
            shape.query_type)) {
    const Int2HeadBlock format = geometry_.Int2Block();
    for (size_t block = 0; block < int2_.size(); block += format.bytes()) {
      Multiply(block + format.key_meta_offset(), shape.key_size);
      Multiply(block + format.value_meta_offset(), shape.value_size);
    }
    // What no query may see.
    const size_t elements = geometry_.Bf16Block().bytes() / 2;
    for (size_t block = 0; block < windows_.size() / elements; ++block) {
      const auto page = static_cast<uint32_t>(block / geometry_.NumHeadBlocks());
      for (uint32_t row = 0; row < 2 * kPageTokens; ++row) {
        if (page * kPageTokens + row % kPageTokens >= shape.window_tokens) {
          std::fill_n(windows_.begin() + static_cast<ptrdiff_t>(block * elements + row * shape.dim),
                      shape.dim, BFloat16{0x7fc0});
        }
      }
    }
  }

  uint32_t num_query_heads() const { return shape_.num_kv_heads * shape_.group; }
  size_t num_rows() const { return size_t{shape_.num_queries} * num_query_heads(); }
  const PrefillShape& shape() const { return shape_; }
  const std::vector<std::byte>& int2() const { return int2_; }
  const std::vector<BFloat16>& windows() const { return windows_; }
  const std::vector<uint16_t>& queries() const { return queries_; }  // Bits of the query type.

  // History's pages backwards, the windows' in their order.
  std::vector<const std::byte*> HistoryTable(const std::byte* base) const {
    std::vector<const std::byte*> table;
    for (uint32_t page = shape_.history_pages; page-- > 0;) {
      table.push_back(base + page * geometry_.PageBytes(PageEncoding::kInt2));
    }
    return table;
  }
  std::vector<const std::byte*> WindowTable(const BFloat16* base) const {
    std::vector<const std::byte*> table;
    for (uint32_t page = 0; page < window_pages_; ++page) {
      table.push_back(reinterpret_cast<const std::byte*>(base) +
                      page * geometry_.PageBytes(PageEncoding::kBf16));
    }
    return table;
  }

  PrefillAttentionParams Params(const void* queries,
                                const std::byte* const* history,
                                const std::byte* const* windows,
                                float* out,
                                float* lse) const {
    PrefillAttentionParams params;
    params.num_queries = shape_.num_queries;
    params.num_query_heads = num_query_heads();
    params.num_kv_heads = shape_.num_kv_heads;
    params.head_dim = shape_.dim;
    params.scale = 1 / std::sqrt(static_cast<float>(shape_.dim));
    params.query_type = shape_.query_type;
    params.queries = queries;
    params.out_type = ElementType::kFloat32;
    params.out = out;
    params.lse = lse;
    params.history = {history, shape_.history_pages,
                      geometry_.HeadBlockOffset(PageEncoding::kInt2, 1, 0),
                      geometry_.HeadRangeBytes(PageEncoding::kInt2)};
    params.history_pages = shape_.history_pages;
    params.windows = {windows, window_pages_, geometry_.HeadBlockOffset(PageEncoding::kBf16, 1, 0),
                      geometry_.HeadRangeBytes(PageEncoding::kBf16)};
    params.window_tokens = shape_.window_tokens;
    return params;
  }

 private:
  // Of fp16 elements that bf16 does not hold.
  static std::vector<uint16_t> QueryBits(const std::vector<BFloat16>& rows, ElementType type) {
    std::vector<uint16_t> bits;
    bits.reserve(rows.size());
    for (const BFloat16 x : rows) {
      bits.push_back(type == ElementType::kFp16 ? Float16::FromFloat(x.ToFloat() * 1.0037f).bits
                                                : x.bits);
    }
    return bits;
  }
  // The scales and minima of a page's rows.
  void Multiply(size_t meta, float size) {
    for (size_t at = meta; at < meta + Int2HeadBlock::meta_bytes(); at += sizeof(Float16)) {
      Float16 number;
      std::memcpy(&number, &int2_[at], sizeof(number));
      number = Float16::FromFloatSaturated(number.ToFloat() * size);
      std::memcpy(&int2_[at], &number, sizeof(number));
    }
  }

  const PrefillShape shape_;
  const Geometry geometry_;
  const uint32_t window_pages_;
  std::vector<std::byte> int2_;
  std::vector<BFloat16> windows_;
  std::vector<uint16_t> queries_;
};

}  // namespace crumb
