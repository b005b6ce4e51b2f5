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
};
struct DecodeFindings {
  uint32_t problems = 0;
  uint32_t sequence = 0;  // The highest that has one.
};

// A block has two places for partial results: [0] for a pair (sequence, KV head) that another block
// began, [1] for one that it began itself and another goes on with. Pairs that lie within one block
// need none. Who merges the pair knows by the words themselves that they have come, for none of
// them is zero, and leaves zeros. So launches of different shapes may take turns with one
// workspace.
struct DecodeWorkspace {
  static constexpr uint32_t kMaxBlocks = 1024;

  std::byte* base = nullptr;
  uint32_t num_blocks = 0;  // Of the launch, at most kMaxBlocks.
  uint32_t group = 0;       // Query heads of a place, at most.
  uint32_t head_dim = 0;

  // The findings lie at the start. Then, [num_blocks, 2, group] of (maximum, sum) in f32, in base-2
  // exponents.
  static constexpr size_t sums_offset() { return kHeaderBytes; }
  // [num_blocks, 2, group, head_dim] f32, not normalised.
  constexpr size_t outputs_offset() const {
    return RoundUp(sums_offset() + place(num_blocks, 0) * group * 2 * sizeof(float));
  }
  constexpr size_t bytes() const {
    return RoundUp(outputs_offset() + place(num_blocks, 0) * group * head_dim * sizeof(float));
  }

  constexpr size_t place(uint32_t block, uint32_t which) const { return size_t{block} * 2 + which; }

 private:
  static constexpr size_t kHeaderBytes = 256;
  static constexpr size_t RoundUp(size_t bytes) { return (bytes + 255) / 256 * 256; }
};

}  // namespace crumb::gpu
