// SPDX-License-Identifier: Apache-2.0
//
// The stack machine behind ParsePickle. Invariants:
//   1. stack_ holds values of tree_; a pop never goes below the innermost mark.
//   2. An opcode makes at most one value, and its operands come from the pickle, so all that is
//      held is proportional to the bytes read.
// Confined to one call of ParsePickle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "cuda/checkpoint/pickle.h"
#include "cuda/checkpoint/pickle_opcodes.h"

namespace crumb::checkpoint {

class PickleMachine {
 public:
  explicit PickleMachine(std::span<const std::byte> pickle) : pickle_(pickle) {}

  absl::StatusOr<PickleTree> Run();

 private:
  // One opcode; whether it was STOP. Each group returns UNIMPLEMENTED for opcodes of the others.
  absl::StatusOr<bool> Step();
  absl::Status Scalar(PickleOpcode opcode);
  absl::Status Container(PickleOpcode opcode);
  absl::Status Memo(PickleOpcode opcode);
  absl::Status Object(PickleOpcode opcode);

  absl::Status Global();
  absl::Status Storage();
  absl::Status Reduce();
  absl::StatusOr<PickleTensor> Tensor(const PickleTuple& arguments) const;
  absl::Status SetItems(std::span<const PickleRef> items);
  absl::Status AppendItems(std::span<const PickleRef> items);

  absl::StatusOr<std::span<const std::byte>> Take(size_t count);
  absl::StatusOr<uint64_t> TakeUnsigned(size_t bytes);  // Little-endian.
  absl::StatusOr<std::string> TakeLine();
  absl::StatusOr<PickleRef> Pop();
  absl::StatusOr<std::vector<PickleRef>> PopToMark();
  absl::StatusOr<std::vector<PickleRef>> PopCount(size_t count);
  absl::Status Push(PickleValue value);

  // Non-negative integers of a tuple, at most kMaxTensorRank.
  absl::StatusOr<std::vector<uint64_t>> Extents(PickleRef ref, const char* what) const;
  absl::StatusOr<uint64_t> Count(PickleRef ref, const char* what) const;

  template <typename... Parts>
  absl::Status Refuse(const Parts&... parts) const;

  std::span<const std::byte> pickle_;
  size_t at_ = 0;         // The next byte.
  size_t opcode_at_ = 0;  // That of the opcode at work, for messages.
  PickleTree tree_;
  std::vector<PickleRef> stack_;
  std::vector<size_t> marks_;  // Heights of stack_.
  std::unordered_map<uint64_t, PickleRef> memo_;
};

}  // namespace crumb::checkpoint
