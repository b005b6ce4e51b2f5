// SPDX-License-Identifier: Apache-2.0
//
// Launches of split decode, one form a head_dim, so that each is compiled by itself. Plain C++ for
// callers that have no CUDA headers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "crumb/cuda/decode_params.h"

struct CUstream_st;

namespace crumb::gpu {

// How a launch is cut; the host chooses by shape and device.
struct DecodeGrid {
  uint32_t num_blocks = 0;
  int num_warps = 0;   // Of a block.
  int num_stages = 0;  // Of a warp's ring, at most 32.
  // Passes over each KV head, and what one takes of its query heads.
  uint32_t passes = 1;
  uint32_t heads_of_pass = 0;
  // More than 1: blocks that take turns with the units of one pair (sequence, KV head and pass).
  // For one sequence only, and num_blocks is that many times the pairs.
  uint32_t team = 1;
  // Whether a launch of settled history may begin before the work ahead of it has ended.
  bool overlaps = true;
  // Whether this launch runs beside the one ahead of it on the stream, which must have waited for
  // all that this one reads or writes before it lets it start. Then it waits for nothing, and ends
  // after the one ahead.
  bool is_beside = false;
};

// The most warps of a block of a team.
inline constexpr int kMaxWarpsOfTeam = 12;

struct SplitDecodeForm {
  // Tiles of four query heads that a pass over a KV head can take.
  uint32_t max_tiles;
  // The most warps that a block of this many tiles may have.
  int (*max_warps)(uint32_t tiles);
  // Shared memory of a block.
  size_t (*shared_bytes)(uint32_t tiles, int num_warps, int num_stages);
  // Enqueues; parameters and grid are valid. Returns a cudaError_t.
  int (*launch)(const SplitDecodeParams& params, const DecodeGrid& grid, CUstream_st* stream);
};

extern const SplitDecodeForm kSplitDecode64;
extern const SplitDecodeForm kSplitDecode128;
extern const SplitDecodeForm kSplitDecode256;

}  // namespace crumb::gpu
