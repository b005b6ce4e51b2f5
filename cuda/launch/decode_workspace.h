// SPDX-License-Identifier: Apache-2.0
//
// The decode ops' workspace: what blocks leave for one another, and for the host, in device memory.
// Arithmetic for host and device. All of it is zero between launches.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crumb::gpu {

// What a launch finds wrong; bits of DecodeFindings::problems.
enum DecodeProblem : uint32_t {
  kNullHistoryPage = 1,
  kNullWindowPage = 2,
  kHistoryBeyondTable = 4,
  kWindowBeyondTable = 8,
  kPartMissing = 16,
  kPrefixBeyondTable = 32,
};
struct DecodeFindings {
  uint32_t problems = 0;
  uint32_t sequence = 0;  // The highest that has one.
};

// A block leaves at most one part, of the last pair (sequence, KV head) that it begins or of the
// one that it is in the middle of, for the last block of that pair. Who merges the pair knows by
// the words themselves that they have come, for none of them is zero, and leaves zeros. So launches
// of different shapes may take turns with one workspace.
struct DecodeWorkspace {
  static constexpr uint32_t kMaxBlocks = 1024;

  uint32_t num_blocks = 0;  // Of the launch, at most kMaxBlocks.
  uint32_t num_heads = 0;   // Query heads of a part, with those that fill its tiles.
  uint32_t head_dim = 0;

  // The findings lie at the start. Then, [num_blocks, num_heads, SumsOf] of (maximum, sum) in f32,
  // in base-2 exponents: one for each warp that merges channels of a head.
  static constexpr size_t sums_offset() { return kHeaderBytes; }
  static constexpr uint32_t SumsOf(uint32_t dim) { return dim > 128 ? dim / 128 : 1; }
  // [num_blocks, num_heads, head_dim] f32, not normalised.
  constexpr size_t outputs_offset() const {
    return RoundUp(sums_offset() + num_rows() * SumsOf(head_dim) * 2 * sizeof(float));
  }
  constexpr size_t bytes() const {
    return RoundUp(outputs_offset() + num_rows() * head_dim * sizeof(float));
  }

 private:
  constexpr size_t num_rows() const { return size_t{num_blocks} * num_heads; }
  static constexpr size_t kHeaderBytes = 256;
  static constexpr size_t RoundUp(size_t bytes) { return (bytes + 255) / 256 * 256; }
};

}  // namespace crumb::gpu
