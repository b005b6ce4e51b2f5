// SPDX-License-Identifier: Apache-2.0
//
// What the decode ops read and write. Plain values for host and device alike; pointers are to
// device memory unless they are given to a reference twin. No header of Abseil or CUDA is needed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crumb {

enum class ElementType : uint8_t { kBf16 = 1, kFp16 = 2, kFloat32 = 3 };

constexpr size_t ElementBytes(ElementType type) {
  return type == ElementType::kFloat32 ? 4 : 2;
}

// One layer's head blocks, found through a table of page images. A page image may be in any arena,
// also in one that another process owns; the head block of KV head h is at
//
//   pages[sequence * stride + page] + block_offset + h * head_stride
//
// and must be 16-byte aligned. Geometry::HeadBlockOffset gives both: block_offset is that of
// (layer, first head of the rank), head_stride is Geometry::HeadRangeBytes. So one table serves
// every layer.
struct DevicePageTable {
  const std::byte* const* pages = nullptr;  // [num_sequences, stride], all of it memory.
  uint32_t stride = 0;                      // Pages a sequence; 0: no pages at all.
  size_t block_offset = 0;
  size_t head_stride = 0;
};

// One query token of each of many sequences over split caches: attention over `history` (whole
// INT2 pages) and `windows` (BF16 pages: the sink, then the recent window; all full but the last),
// one softmax over both. Order of pages does not matter.
struct SplitDecodeParams {
  uint32_t num_sequences = 0;
  uint32_t num_query_heads = 0;  // A multiple of num_kv_heads; at most 16 a KV head.
  uint32_t num_kv_heads = 0;     // Query head h reads KV head h / (num_query_heads / num_kv_heads).
  uint32_t head_dim = 0;         // Of K and V: 64, 128 or 256.
  float scale = 0;               // Of the scores: usually 1 / sqrt(head_dim).

  ElementType query_type = ElementType::kBf16;  // kBf16 or kFp16.
  ElementType out_type = ElementType::kBf16;
  const void* queries = nullptr;  // [num_sequences, num_query_heads, head_dim], rotated, dense.
  void* out = nullptr;            // [num_sequences, num_query_heads, head_dim], still rotated.
  // [num_sequences, num_query_heads], nullable: log of the sum of exp(score), -inf where a sequence
  // has no token (its `out` is 0). Keys are mean-shifted: see split_attention.h.
  float* lse = nullptr;

  DevicePageTable history;
  const uint32_t* history_pages = nullptr;  // [num_sequences]: whole pages, <= history.stride.
  DevicePageTable windows;
  const uint32_t* window_tokens = nullptr;  // [num_sequences], <= windows.stride * kPageTokens.

  // At least SplitDecodeWorkspaceBytes, 256-byte aligned. Zeroed before the first launch that uses
  // it; every launch leaves it ready for the next. Two launches that may run at once need two.
  void* workspace = nullptr;
  size_t workspace_bytes = 0;

  // The caller's word that the work directly before this launch on its stream writes neither
  // history pages, page tables nor lengths. The launch then starts reading history while that work
  // still runs (programmatic dependent launch; compute capability 9.0 or later, else no effect).
  // Queries, windows and outputs are touched only after it has ended, whatever this says.
  bool history_is_settled = false;
};

}  // namespace crumb
