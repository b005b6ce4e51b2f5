// SPDX-License-Identifier: Apache-2.0
//
// Demotion on the GPU: BF16 rows of whole pages, all layers and heads in one launch (two where keys
// are rounded with feedback), to INT2 head blocks. The same codec as demote.h.
//
// Rows that are rotated already give the CPU's bytes, bit for bit, under oscar-int2 and -lm and for
// values under either codec. Plain rows are rotated on the tensor cores with a sum in another
// order, so codes may differ where an element lies on the border of two. Keys under
// oscar-int2-aware push errors on by tensor cores, 16 channels at a time, and try other ranges; the
// loss in the metric is less than the CPU's by some per cent, a single page's at times a little
// more. Deterministic on one device.
//
// No allocation, no synchronisation, capturable in a CUDA graph. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"

#include "crumb/cuda/device.h"
#include "crumb/cuda/device_profile.h"

namespace crumb {

// Rows of K or of V, found through a table: the row of (page, layer, head, token) is at
//
//   pages[page] + offset + layer * layer_stride + head * head_stride + token * token_stride
//
// with layer and head counted from the params' first ones. head_dim elements each, dense. Serves
// page images of BF16 head blocks and engines' own tensors alike. Offset and strides in bytes,
// multiples of 16; pages 16-byte aligned.
struct DeviceRows {
  const std::byte* const* pages = nullptr;  // [num_pages]
  size_t offset = 0;
  size_t layer_stride = 0;
  size_t head_stride = 0;
  size_t token_stride = 0;
};

// INT2 head blocks: that of (page, layer, head) is at
//   pages[page] + offset + layer * layer_stride + head * head_stride,
// 16-byte aligned.
struct DeviceBlocks {
  std::byte* const* pages = nullptr;  // [num_pages]
  size_t offset = 0;
  size_t layer_stride = 0;
  size_t head_stride = 0;
};

struct DemotePagesParams {
  DeviceHeads heads;
  uint32_t num_pages = 0;
  // Layers [first_layer, first_layer + num_layers) of the profile, and heads likewise.
  uint32_t first_layer = 0;
  uint32_t num_layers = 0;
  uint32_t first_head = 0;
  uint32_t num_heads = 0;
  bool rows_are_rotated = false;  // As windows hold them; else as the model made them (keys after
                                  // RoPE).
  DeviceRows keys;
  DeviceRows values;
  DeviceBlocks int2;
  // One word of device memory, zeroed before its first use: where a launch leaves the first null
  // page of its tables, or else the first row with NaN or inf, for TakeDemotePagesProblem.
  uint64_t* finding = nullptr;
  // `finding` is [num_pages]: each page has its own word, for callers that copy the words out in
  // the stream's order and ask DescribeDemoteFinding, without waiting.
  bool has_finding_per_page = false;
};

// What can be told without reading device memory. INVALID_ARGUMENT names the field, its value and
// the limit. UNIMPLEMENTED: heads that only the CPU demotes (see DeviceHeads).
absl::Status ValidateDemotePages(const DemotePagesParams& params);

// Validates and enqueues on `stream`. INVALID_ARGUMENT as ValidateDemotePages, UNIMPLEMENTED or
// UNAVAILABLE as CurrentGpu, INTERNAL with CUDA's words for a launch that was refused.
absl::Status DemotePages(const DemotePagesParams& params, GpuStream stream);

// Null pages and rows with NaN or inf: the K or V part of their head blocks is not written, all
// others are. The finding stays until this call takes it out. Waits for `stream`. INVALID_ARGUMENT
// names table and page of the first null page, or else K or V, page, layer, head and token of the
// first such row. Not for has_finding_per_page.
absl::Status TakeDemotePagesProblem(const DemotePagesParams& params, GpuStream stream);

// What a word of `finding`, copied out, says: OK for 0, else as TakeDemotePagesProblem.
absl::Status DescribeDemoteFinding(const DemotePagesParams& params, uint64_t finding);

// The readable twin: the same parameters with pointers to host memory, and the profile's heads
// [num_layers, num_kv_heads] instead of params.heads.records. INVALID_ARGUMENT also for the first
// null page, before anything is written, and for the first row with NaN or inf; blocks after it are
// not written.
absl::Status DemotePagesReference(const DemotePagesParams& params,
                                  std::span<const HeadParameters> heads);

}  // namespace crumb
