// SPDX-License-Identifier: Apache-2.0
//
// Expansion on the GPU: INT2 head blocks of many pages, layers and heads, back to BF16 rows in an
// engine's own KV cache, in one launch. For engines without a two-bit kernel, which still gain
// transfer and capacity.
//
// Codes are exact operands of the integer tensor cores and the inverse rotation is in fixed point
// of 16 bits, so rows are as near to the twin's as BF16 holds. Deterministic.
//
// No allocation, no synchronisation, capturable in a CUDA graph. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"

#include "crumb/cuda/device.h"
#include "crumb/cuda/device_profile.h"
#include "crumb/cuda/expand.h"

namespace crumb {

// Head blocks to read, laid out as DeviceBlocks (demote_pages.h).
struct ConstDeviceBlocks {
  const std::byte* const* pages = nullptr;  // [num_pages]
  size_t offset = 0;
  size_t layer_stride = 0;
  size_t head_stride = 0;
};

// K or V of an engine's paged cache: the row of (layer, head) at position p of the sequence is at
//
//   layers[layer] + offset + block_table[p / block_tokens] * block_stride
//                 + p % block_tokens * token_stride + head * head_stride
//
// with layer and head counted from the params' first ones. So NHD ([block, token, head, dim]) has a
// token_stride of num_heads rows and a head_stride of one, HND ([block, head, token, dim]) the
// reverse; K and V in one tensor differ in offset. Strides in bytes, multiples of 16; rows 16-byte
// aligned.
struct DevicePagedRows {
  std::byte* const* layers = nullptr;  // [num_layers]
  size_t offset = 0;
  size_t block_stride = 0;
  size_t token_stride = 0;
  size_t head_stride = 0;
};

struct ExpandPagesParams {
  DeviceHeads heads;
  uint32_t num_pages = 0;
  uint32_t first_layer = 0;  // Layers and heads as in DemotePagesParams.
  uint32_t num_layers = 0;
  uint32_t first_head = 0;
  uint32_t num_heads = 0;
  ExpandSpace space = ExpandSpace::kModel;
  ConstDeviceBlocks int2;

  DevicePagedRows keys;
  DevicePagedRows values;
  const int32_t* block_table = nullptr;  // [(first_position + num_tokens) / block_tokens, up]
  uint32_t block_tokens = 0;             // 1 or more.
  uint32_t num_blocks = 0;               // Of the cache; entries of the table are below it.
  uint32_t first_position = 0;           // Of the first page's token 0 in the sequence.
  // Tokens to write: of the last page maybe not all. Pages beyond them are not read.
  uint32_t num_tokens = 0;

  // One word of device memory, zeroed before its first use: how many rows a launch has left out
  // because their page or their layer of the cache is null, or their entry of the block table is
  // not a block of the cache.
  uint64_t* rows_left_out = nullptr;
};

// What can be told without reading device memory. INVALID_ARGUMENT names the field, its value and
// the limit.
absl::Status ValidateExpandPages(const ExpandPagesParams& params);

// Validates and enqueues on `stream`. INVALID_ARGUMENT as ValidateExpandPages, UNIMPLEMENTED or
// UNAVAILABLE as CurrentGpu, INTERNAL with CUDA's words for a launch that was refused.
absl::Status ExpandPages(const ExpandPagesParams& params, GpuStream stream);

// Whether all rows of the launches since the last call were written; takes the count out. Waits for
// `stream`. INVALID_ARGUMENT says how many were not.
absl::Status TakeExpandPagesProblem(const ExpandPagesParams& params, GpuStream stream);

// The readable twin: the same parameters with pointers to host memory, and the profile's heads
// [num_layers, num_kv_heads] instead of params.heads.records. INVALID_ARGUMENT also says how many
// rows were left out.
absl::Status ExpandPagesReference(const ExpandPagesParams& params,
                                  std::span<const HeadParameters> heads);

}  // namespace crumb
