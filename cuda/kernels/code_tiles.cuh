// SPDX-License-Identifier: Apache-2.0
//
// From the words of an INT2 page to tiles of 16-bit elements in shared memory, which warpgroup
// products read. A tile is blocks of 128-byte rows; chunk c of 16 bytes of row r is at place
// c ^ (r % 8) of the row.
//
// Tokens and channels lie in the order in which words hold them, so that a word is two chunks:
//   Token 16 j + 8 kk + 4 half + t is row 8 (4 kk + t) + 4 half + {0, 2, 1, 3}[j] of K's tile and
//   that element of V's rows. Rows of K are columns of scores, so probabilities have V's order
//   without a move.
//   Channel 32 ks + 16 half + 4 t + i of K is element 8 (4 ks + t) + 4 half + {0, 2, 1, 3}[i].
#pragma once

#include <cstddef>
#include <cstdint>

#include "proto/page/page_format.h"

namespace crumb::gpu {

inline constexpr int kWarpgroupThreads = 128;
inline constexpr uint32_t kSwizzleRow = 128;              // Bytes of a row of a block.
inline constexpr uint32_t kTileBlock = 64 * kSwizzleRow;  // 64 rows of 64 elements.

// The token of a row of K's tile.
__device__ __forceinline__ uint32_t TokenOfTileRow(uint32_t row) {
  const uint32_t j = row % 2 * 2 + row % 4 / 2;
  return 16 * j + row / 32 * 8 + row % 8 / 4 * 4 + row / 8 % 4;
}

// Which lane (g, t) of the page format a thread of a warpgroup is: eight neighbouring threads have
// g and g + 4, so that their chunks meet no bank twice.
struct TileLane {
  uint32_t row;    // g
  uint32_t chunk;  // t

  __device__ __forceinline__ explicit TileLane(uint32_t thread)
      : row(thread % 8 / 4 * 4 + thread % 32 / 8), chunk(thread % 4) {}
  // The first of four neighbouring rows of K's tile: tokens g, g + 16, g + 32 and g + 48 of a page.
  __device__ __forceinline__ uint32_t first_key_row() const { return row % 4 * 8 + row / 4 * 4; }
  // Among a warp's 32 vectors of the page.
  __device__ __forceinline__ uint32_t vector() const { return row * 4 + chunk; }
};

__device__ __forceinline__ void StoreTileChunk(std::byte* block,
                                               uint32_t row,
                                               uint32_t chunk,
                                               uint4 what) {
  *reinterpret_cast<uint4*>(block + row * kSwizzleRow + (chunk ^ (row % 8)) * 16) = what;
}

// (x & mask) | bits, which the compiler would make two instructions of.
__device__ __forceinline__ uint32_t AndOr(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
  return y;
}

// The 16 codes of a word as two chunks of fp16: `lower` has those at places 0 and 4 of the word's
// bytes, `upper` those at 2 and 6. Pair k of a chunk is what `convert` makes of (code, k), where
// `code` is two codes c as 1 + c / 16 (lower) or 1 + c / 4 (upper).
struct CodeChunks {
  uint32_t lower[4];
  uint32_t upper[4];

  template <typename Lower, typename Upper>
  __device__ __forceinline__ void Convert(uint32_t word,
                                          Lower&& convert_lower,
                                          Upper&& convert_upper) {
    const uint32_t places[4] = {word << 6, word >> 2, word << 2, word >> 6};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      lower[k] = convert_lower(AndOr(places[k], 0x00c000c0u, 0x3c003c00u), k);
      upper[k] = convert_upper(AndOr(places[k], 0x03000300u, 0x3c003c00u), k);
    }
  }
  // To rows `row` and `row` + `apart`, a multiple of eight.
  __device__ __forceinline__ void Store(std::byte* block,
                                        uint32_t row,
                                        uint32_t apart,
                                        uint32_t chunk) const {
    StoreTileChunk(block, row, chunk, make_uint4(lower[0], lower[1], lower[2], lower[3]));
    StoreTileChunk(block, row + apart, chunk, make_uint4(upper[0], upper[1], upper[2], upper[3]));
  }
};

}  // namespace crumb::gpu
