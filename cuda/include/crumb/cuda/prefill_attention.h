// SPDX-License-Identifier: Apache-2.0
//
// Attention of a chunk of a prompt over a cached prefix on the GPU: INT2 history and BF16 windows
// are read in place, the prefix is never written out in BF16. Bound by the tensor cores.
//
// Codes 0..3 are exact bf16 operands; scale and minimum of a row stay outside the products, in f32.
// Queries are not rounded (they are 16 bits already), probabilities are to bf16. Results are the
// same bits from run to run, but not from one compute capability to another.
//
// No allocation, no synchronisation, capturable in a CUDA graph. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"

#include "crumb/cuda/decode_params.h"
#include "crumb/cuda/device.h"

namespace crumb {

// `num_queries` consecutive tokens of one sequence, which are the last rows of `windows`: query i
// sees all of history, and all rows of the windows but the last num_queries - 1 - i.
struct PrefillAttentionParams {
  uint32_t num_queries = 0;
  uint32_t num_query_heads = 0;  // A multiple of num_kv_heads; at most 64 a KV head.
  uint32_t num_kv_heads = 0;
  uint32_t head_dim = 0;  // Of K and V: 64, 128 or 256.
  float scale = 0;        // Of the scores: usually 1 / sqrt(head_dim).

  // kBf16 or kFp16; the products take bf16, to which queries of kFp16 are rounded.
  ElementType query_type = ElementType::kBf16;
  const void* queries = nullptr;  // [num_queries, num_query_heads, head_dim], rotated, dense.
  ElementType out_type = ElementType::kBf16;
  void* out = nullptr;   // As queries, of out_type; still rotated.
  float* lse = nullptr;  // [num_queries, num_query_heads], nullable; as SplitDecodeParams::lse.

  // Tables of one sequence: stride is the number of pages.
  DevicePageTable history;
  uint32_t history_pages = 0;  // Whole pages, <= history.stride. Their order does not matter.
  DevicePageTable windows;  // Sink, recent window and the chunk's own rows, in order of position.
  uint32_t window_tokens = 0;  // >= num_queries, <= windows.stride * 64.
  // One word of device memory, zeroed before its first use: how many pages of launches were null.
  // Such a page counts as 64 tokens whose keys and values are zero. Nullable: nobody asks.
  uint64_t* null_pages = nullptr;
};

// What can be told without reading device memory. INVALID_ARGUMENT names the field, its value and
// the limit.
absl::Status ValidatePrefillAttention(const PrefillAttentionParams& params);

// Validates and enqueues on `stream`. INVALID_ARGUMENT as ValidatePrefillAttention, UNIMPLEMENTED
// or UNAVAILABLE as CurrentGpu, INTERNAL with CUDA's words for a launch that was refused.
absl::Status PrefillAttention(const PrefillAttentionParams& params, GpuStream stream);

// INVALID_ARGUMENT: launches met null pages, how many. OK without null_pages. Waits for `stream`;
// the word is zero afterwards.
absl::Status TakePrefillAttentionProblem(const PrefillAttentionParams& params, GpuStream stream);

// The readable twin, in double: the same parameters with pointers to host memory.
absl::Status PrefillAttentionReference(const PrefillAttentionParams& params);

}  // namespace crumb
