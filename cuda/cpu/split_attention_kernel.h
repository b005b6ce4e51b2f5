// SPDX-License-Identifier: Apache-2.0
//
// Split attention for one instruction set: what the driver (split_attention.cc) prepares and what
// the kernels share. history_kernel.h reads INT2 pages, window_kernel.h BF16 rows; both are written
// once over a vector type (simd_avx512.h and its siblings).
//
// Query heads of all query tokens are "rows": row = query * group + head. History looks the same to
// every one of them, so they go through it in chunks of kChunkRows, whatever query they belong to.
// Scores are in units of log 2 throughout, so that the exponential is 2^x.
#pragma once

#include <cstddef>
#include <cstdint>

#include "proto/base/bfloat16.h"
#include "proto/page/page_format.h"

namespace crumb::cpu {

inline constexpr size_t kChunkRows = 4;

// The state of one online softmax over kChunkRows rows; entries past them only pad a vector.
struct alignas(64) ChunkState {
  static constexpr size_t kMaxLanes = 16;
  float max[kMaxLanes];     // m: about the highest score so far, or -infinity.
  float sum[kMaxLanes];     // Sum of 2^(score - m).
  float offset[kMaxLanes];  // Sum of 2^(score - m) * (minimum of the value row).
  // log2 of the sum of 2^score that is expected at the end, guessed low, or -infinity. Only for
  // deciding how exactly to read.
  float expected[kMaxLanes];
};

// Queries of one chunk as fixed point: query = unit * (digit 0 + digit 1 / 256), both signed whole
// numbers. Digit 0 alone is the nearest that one digit can come.
//   digits [2][key_dim / 32][4 t][2 half][kChunkRows] words of four channels: byte j of word
//   (digit, step, t, half, row) is channel 32 * step + 16 * half + 4 * t + j.
struct FixedQueries {
  // What 1 of digit 0 is worth, times the attention's scale and log2(e); not negative.
  alignas(64) float units[ChunkState::kMaxLanes] = {};
  const int32_t* digits[2] = {};
  // Of a score read with digit 0 alone, for a key scale of 1: the deviation of its error.
  float errors[kChunkRows] = {};
  float sums[2][kChunkRows] = {};  // Of each digit over the channels.
};

// The history of one KV head against all of its rows.
struct HistoryArgs {
  size_t key_dim = 0;
  size_t value_dim = 0;
  const std::byte* const* pages = nullptr;  // [num_pages] INT2 head blocks.
  size_t num_pages = 0;                     // >= 1
  size_t num_rows = 0;                      // >= 1
  const FixedQueries* queries = nullptr;    // One a chunk, as the next.
  ChunkState* states = nullptr;
  float* outputs = nullptr;  // [chunks][kChunkRows][PaddedValueDim], unnormalised.
};

// Tokens of a page are in the order of the scores' vectors: position 32 rh + 4 g + mt is token
// 16 mt + 8 rh + g.
//
// A value tile is 32 channels: of tile 2 p + m, half rh, lane l, channel 64 p + 32 (l / 8) + 16 m +
// 8 rh + l % 8. The last tiles may reach past value_dim; what is computed there means nothing.
constexpr size_t NumValueTiles(size_t value_dim) {
  return (value_dim + 63) / 64 * 2;
}
constexpr size_t kValueTileChannels = 32;

// History's outputs of one chunk: [kChunkRows][value tiles][2 rh][16], unnormalised.
constexpr size_t PaddedValueDim(size_t value_dim) {
  return NumValueTiles(value_dim) * kValueTileChannels;
}
// The channel of history's output `i` of a row.
constexpr size_t ChannelOfOutput(size_t i) {
  const size_t tile = i / 32;
  const size_t row_half = i % 32 / 16;
  const size_t lane = i % 16;
  return tile / 2 * 64 + lane / 8 * 32 + tile % 2 * 16 + row_half * 8 + lane % 8;
}

// A BF16 segment against one chunk. Row r sees tokens [0, visible[r]).
struct WindowArgs {
  const BFloat16* keys = nullptr;
  const BFloat16* values = nullptr;
  size_t num_tokens = 0;  // At most kWindowTile.
  size_t visible[kChunkRows] = {};
  const float* queries = nullptr;  // [kChunkRows][key_dim]
  float score_scale = 0;           // The attention's scale times log2(e).
  float* outputs = nullptr;        // [kChunkRows][value_dim], unnormalised, channels in order.
};
inline constexpr size_t kWindowTile = 64;

// One instruction set's kernels.
struct SplitAttentionFunctions {
  // Adds all pages to all rows.
  void (*attend_history)(const HistoryArgs& args);
  // Adds a tile of a BF16 segment to a chunk's rows; a row that sees none of it is left alone.
  void (*attend_window)(size_t key_dim,
                        size_t value_dim,
                        const WindowArgs& args,
                        ChunkState& state);
};

const SplitAttentionFunctions& PortableSplitAttentionFunctions();
const SplitAttentionFunctions& Avx2SplitAttentionFunctions();
const SplitAttentionFunctions& Avx512SplitAttentionFunctions();

}  // namespace crumb::cpu
