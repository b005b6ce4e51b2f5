// SPDX-License-Identifier: Apache-2.0
//
// The layout of a chunk: one sealed memfd of the daemon's arena, mapped read-only by engines. A
// chunk belongs to one namespace and holds blocks of one encoding, so all blocks have one size.
//
//   [header table: num_blocks x PageHeader, padded to kChunkAlignment][block 0][block 1]...
//
// A block's header is beside it in the table. The daemon makes `generation` odd before it changes a
// block's bytes and even when they are settled (release); a reader loads it (acquire) before and
// after it reads, and believes what it read only if both equal the generation it was told.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "proto/page/geometry.h"
#include "proto/page/page_header.h"

namespace crumb {

// Blocks start on pages of the machine, so that they can be registered with devices one by one.
inline constexpr size_t kChunkAlignment = 4096;

struct ChunkLayout {
  size_t image_bytes = 0;  // Of one page image.
  uint32_t num_blocks = 0;

  // As many blocks as fit into `target_bytes`, and at least one.
  static constexpr ChunkLayout Fit(const Geometry& geometry,
                                   PageEncoding encoding,
                                   size_t target_bytes) {
    ChunkLayout layout{geometry.PageBytes(encoding), 1};
    const size_t per_block = layout.block_stride() + sizeof(PageHeader);
    layout.num_blocks =
        static_cast<uint32_t>(std::clamp<size_t>(target_bytes / per_block, 1, 1u << 20));
    while (layout.num_blocks > 1 && layout.total_bytes() > target_bytes) {
      --layout.num_blocks;
    }
    return layout;
  }

  constexpr size_t block_stride() const { return RoundUp(image_bytes); }
  static constexpr size_t header_offset(uint32_t block) {
    return size_t{block} * sizeof(PageHeader);
  }
  constexpr size_t block_offset(uint32_t block) const {
    return RoundUp(size_t{num_blocks} * sizeof(PageHeader)) + size_t{block} * block_stride();
  }
  constexpr size_t total_bytes() const { return block_offset(num_blocks); }

 private:
  static constexpr size_t RoundUp(size_t bytes) {
    return (bytes + kChunkAlignment - 1) / kChunkAlignment * kChunkAlignment;
  }
};

}  // namespace crumb
