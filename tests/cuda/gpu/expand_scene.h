// SPDX-License-Identifier: Apache-2.0
//
// An engine's paged cache for the tests of expansion: blocks in random order, as NHD or HND, K and
// V of a layer in one tensor or in two.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "crumb/cuda/expand_pages.h"
#include "proto/base/float16.h"
#include "tests/cuda/gpu/page_scene.h"

namespace crumb {

enum class CacheOrder { kNhd, kHnd };

struct CacheShape {
  CacheOrder order = CacheOrder::kNhd;
  uint32_t block_tokens = 16;
  uint32_t first_position = 0;
  uint32_t num_tokens = 0;
};

class EngineCache {
 public:
  EngineCache(const PageScene& scene, const CacheShape& shape) : scene_(scene), shape_(shape) {
    const uint32_t used =
        (shape.first_position + shape.num_tokens + shape.block_tokens - 1) / shape.block_tokens;
    num_blocks_ = used + 3;
    std::vector<int32_t> order(num_blocks_);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(shape.block_tokens));
    table_.assign(order.begin(), order.begin() + used);
  }

  // Bytes of one layer: blocks of K and then V.
  size_t layer_bytes() const { return num_blocks_ * block_stride(); }
  size_t bytes() const { return scene_.geometry().num_layers * layer_bytes(); }
  std::vector<int32_t>& table() { return table_; }
  template <typename Byte>
  std::vector<Byte*> Layers(Byte* base) const {
    std::vector<Byte*> layers;
    for (uint32_t layer = 0; layer < scene_.geometry().num_layers; ++layer) {
      layers.push_back(base + layer * layer_bytes());
    }
    return layers;
  }

  // Of all heads, K and V of one token, in the cache's bytes; NHD.
  void FillRows(std::vector<std::byte>& cache, size_t layer, uint32_t token, std::byte what) const {
    const uint32_t position = shape_.first_position + token;
    const auto block = static_cast<size_t>(table_[position / shape_.block_tokens]);
    const size_t rows = size_t{2} * scene_.geometry().num_kv_heads * scene_.geometry().key_dim;
    const size_t at =
        layer * layer_bytes() + block * block_stride() + position % shape_.block_tokens * rows;
    for (const size_t part : {size_t{0}, block_stride() / 2}) {
      std::fill_n(cache.begin() + static_cast<ptrdiff_t>(at + part), rows, what);
    }
  }

  ExpandPagesParams Params(const std::byte* const* int2,
                           std::byte* const* layers,
                           const int32_t* table,
                           ExpandSpace space) const {
    const Geometry& geometry = scene_.geometry();
    const size_t row = size_t{2} * geometry.key_dim;
    ExpandPagesParams params;
    params.heads.num_layers = geometry.num_layers;
    params.heads.num_kv_heads = geometry.num_kv_heads;
    params.heads.head_dim = geometry.key_dim;
    params.num_pages = scene_.num_pages();
    params.num_layers = geometry.num_layers;
    params.num_heads = geometry.num_kv_heads;
    params.space = space;
    params.int2 = {int2, 0, geometry.HeadBlockBytes(PageEncoding::kInt2),
                   geometry.HeadRangeBytes(PageEncoding::kInt2)};
    params.keys = {layers, 0, block_stride(), row * geometry.num_kv_heads, row};
    if (shape_.order == CacheOrder::kHnd) {
      params.keys.token_stride = row;
      params.keys.head_stride = row * shape_.block_tokens;
    }
    params.values = params.keys;
    params.values.offset = block_stride() / 2;
    params.block_table = table;
    params.block_tokens = shape_.block_tokens;
    params.num_blocks = num_blocks_;
    params.first_position = shape_.first_position;
    params.num_tokens = shape_.num_tokens;
    return params;
  }

 private:
  size_t block_stride() const {
    return size_t{4} * shape_.block_tokens * scene_.geometry().num_kv_heads *
           scene_.geometry().key_dim;
  }

  const PageScene& scene_;
  const CacheShape shape_;
  uint32_t num_blocks_ = 0;
  std::vector<int32_t> table_;
};

// Any bytes are codes; scales and minima are those of plausible rows.
inline std::vector<std::byte> RandomInt2Pages(const PageScene& scene, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> pages(scene.num_pages() * scene.int2_bytes());
  for (std::byte& byte : pages) {
    byte = static_cast<std::byte>(random());
  }
  const Int2HeadBlock format = scene.geometry().Int2Block();
  std::uniform_real_distribution<float> scale(0.2f, 1.0f);
  for (size_t block = 0; block < pages.size(); block += format.bytes()) {
    for (size_t row = 0; row < 2 * kPageTokens; ++row) {
      const float step = scale(random);
      const uint16_t pair[2] = {Float16::FromFloat(step).bits,
                                Float16::FromFloat(-step * (1 + scale(random))).bits};
      std::memcpy(pages.data() + block + format.key_meta_offset() + 4 * row, pair, sizeof(pair));
    }
  }
  return pages;
}

}  // namespace crumb
