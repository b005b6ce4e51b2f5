// SPDX-License-Identifier: Apache-2.0
//
// The shape of a model's KV cache, and the bytes that follow from it. Values; constexpr throughout.
#pragma once

#include <cstddef>
#include <cstdint>

#include "proto/page/page_format.h"

namespace crumb {

struct Geometry {
  uint32_t num_layers = 0;    // 1..kMaxLayers
  uint32_t num_kv_heads = 0;  // 1..kMaxKvHeads
  uint32_t key_dim = 0;       // head_dim of K: a multiple of 32, 32..kMaxHeadDim
  uint32_t value_dim = 0;     // head_dim of V: as key_dim

  static constexpr uint32_t kMaxLayers = 512;
  static constexpr uint32_t kMaxKvHeads = 64;  // PageHeader keeps one bit and one checksum a head.

  constexpr bool IsValid() const {
    return num_layers >= 1 && num_layers <= kMaxLayers && num_kv_heads >= 1 &&
           num_kv_heads <= kMaxKvHeads && IsValidHeadDim(key_dim) && IsValidHeadDim(value_dim);
  }
  constexpr size_t NumHeadBlocks() const { return size_t{num_layers} * num_kv_heads; }

  constexpr Int2HeadBlock Int2Block() const { return {key_dim, value_dim}; }
  constexpr Bf16HeadBlock Bf16Block() const { return {key_dim, value_dim}; }
  constexpr size_t HeadBlockBytes(PageEncoding encoding) const {
    return encoding == PageEncoding::kInt2 ? Int2Block().bytes() : Bf16Block().bytes();
  }
  // One KV head over all layers: the unit of presence and checksum, contiguous in the image.
  constexpr size_t HeadRangeBytes(PageEncoding encoding) const {
    return num_layers * HeadBlockBytes(encoding);
  }
  // The page image: head blocks in the order [kv_head][layer].
  constexpr size_t PageBytes(PageEncoding encoding) const {
    return num_kv_heads * HeadRangeBytes(encoding);
  }
  constexpr size_t HeadBlockOffset(PageEncoding encoding, uint32_t layer, uint32_t kv_head) const {
    return (size_t{kv_head} * num_layers + layer) * HeadBlockBytes(encoding);
  }

  friend constexpr bool operator==(const Geometry&, const Geometry&) = default;
};

}  // namespace crumb
