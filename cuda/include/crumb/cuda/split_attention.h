// SPDX-License-Identifier: Apache-2.0
//
// Attention of one KV head's query heads over a split cache: INT2 history and BF16 rows (sink and
// recent window), one online softmax over both. Reads head blocks in place; codes are used as exact
// integers and never expanded to an array of floats.
//
// For decode (one query token) and for a chunk of a prefill (several, causal among themselves).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"

#include "crumb/cuda/cpu_path.h"
#include "proto/base/bfloat16.h"

namespace crumb {

// Consecutive rotated rows.
struct Bf16Rows {
  const BFloat16* keys = nullptr;    // [num_tokens, key_dim], dense.
  const BFloat16* values = nullptr;  // [num_tokens, value_dim], dense.
  uint32_t num_tokens = 0;
};

struct SplitAttentionParams {
  uint32_t key_dim = 0;      // A multiple of 32, at most kMaxHeadDim.
  uint32_t value_dim = 0;    // As key_dim.
  uint32_t num_queries = 0;  // Query tokens, >= 1: the last num_queries rows of `windows`.
  uint32_t group = 0;        // Query heads that share this KV head, 1..64.
  float scale = 0;           // Of the scores: usually 1 / sqrt(key_dim).

  const float* queries = nullptr;  // [num_queries, group, key_dim] f32, rotated, dense.
  // INT2 head blocks of whole pages, 16-byte aligned; every query sees all of them. Their order
  // does not matter, softmax has none.
  std::span<const std::byte* const> history;
  // Sink, recent window and the chunk's own rows, in order of position. Query i sees all rows but
  // the last num_queries - 1 - i, so num_queries must not exceed their number.
  std::span<const Bf16Rows> windows;

  float* out = nullptr;  // [num_queries, group, value_dim] f32, still rotated.
  // [num_queries, group] f32, nullable: log of the sum of exp(score), for merging with another
  // partial. Keys are mean-shifted: add scale * (unrotated query . key_mean) before merging with a
  // partial over unshifted keys.
  float* lse = nullptr;
};

// INVALID_ARGUMENT names the field, its value and the limit. Blocking, Thread-safe,
// single-threaded: the caller spreads KV heads over threads.
absl::Status SplitAttention(const SplitAttentionParams& params, CpuPath path = BestCpuPath());

}  // namespace crumb
