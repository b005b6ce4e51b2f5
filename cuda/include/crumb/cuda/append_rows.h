// SPDX-License-Identifier: Apache-2.0
//
// New tokens of one layer: K and V are rotated into stored form (keys mean-shifted) and put into
// the BF16 pages of their sequences' windows, queries are rotated for split_decode. One launch a
// layer, bound by latency: where the device can (9.0 on), it begins while the work ahead of it on
// the stream ends and reads the profile's rotations, which nothing changes; all else waits for that
// work.
//
// Rotation has 16 bits of the matrix (device_profile.h): results are those of rotate.h but for the
// order of a sum. NaN and inf are stored as they come; demotion refuses them later.
//
// No allocation, no synchronisation, capturable in a CUDA graph. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"

#include "crumb/cuda/decode_params.h"
#include "crumb/cuda/device.h"
#include "crumb/cuda/device_profile.h"

namespace crumb {

// Rows [num_tokens, heads, head_dim] of which heads are dense; tokens may lie apart, as in a fused
// tensor of Q, K and V. 16-byte aligned.
struct TokenRows {
  const void* data = nullptr;
  size_t token_stride = 0;  // Bytes, a multiple of 16.
};

struct AppendRowsParams {
  static constexpr uint32_t kNoSlot = ~0u;

  DeviceHeads heads;
  uint32_t layer = 0;
  uint32_t first_head = 0;  // KV heads [first_head, first_head + num_kv_heads) of the profile.
  uint32_t num_kv_heads = 0;
  uint32_t num_query_heads = 0;  // A multiple of num_kv_heads, as split_decode has them; 0: none.
  uint32_t num_tokens = 0;

  ElementType type = ElementType::kBf16;  // Of all rows and of rotated_queries: kBf16 or kFp16.
  TokenRows queries;                      // [num_tokens, num_query_heads, head_dim]
  // Both null: only queries are rotated; pages, slots and tokens_left_out are not used then.
  TokenRows keys;                   // [num_tokens, num_kv_heads, head_dim], after RoPE.
  TokenRows values;                 // [num_tokens, num_kv_heads, head_dim]
  void* rotated_queries = nullptr;  // Out: as queries, dense.

  // Out: the windows, laid out as SplitDecodeParams::windows: BF16 head blocks.
  std::byte* const* pages = nullptr;  // [num_sequences, stride]
  uint32_t num_sequences = 0;
  uint32_t stride = 0;      // Pages a sequence.
  size_t block_offset = 0;  // As DevicePageTable's; of this layer and the first head.
  size_t head_stride = 0;
  const uint32_t* sequences = nullptr;  // [num_tokens]; null: token i is of sequence i.
  // [num_tokens]: the row of the sequence's windows that the token takes, stride * 64 at most;
  // kNoSlot for a token that is padding: its K and V go nowhere.
  const uint32_t* slots = nullptr;
  // One word of device memory, zeroed before its first use: how many tokens a launch has left out
  // because their sequence or slot is beyond the table, or their page null.
  uint64_t* tokens_left_out = nullptr;
};

// What can be told without reading device memory. INVALID_ARGUMENT names the field, its value and
// the limit.
absl::Status ValidateAppendRows(const AppendRowsParams& params);

// Validates and enqueues on `stream`. INVALID_ARGUMENT as ValidateAppendRows, UNIMPLEMENTED or
// UNAVAILABLE as CurrentGpu, INTERNAL with CUDA's words for a launch that was refused.
absl::Status AppendRows(const AppendRowsParams& params, GpuStream stream);

// Whether all tokens of the launches since the last call had a place; takes the count out. Waits
// for `stream`. INVALID_ARGUMENT says how many had none.
absl::Status TakeAppendRowsProblem(const AppendRowsParams& params, GpuStream stream);

// The readable twin, in double: the same parameters with pointers to host memory, and the
// profile's heads [num_layers, num_kv_heads] instead of params.heads.records.
absl::Status AppendRowsReference(const AppendRowsParams& params,
                                 std::span<const HeadParameters> heads);

}  // namespace crumb
