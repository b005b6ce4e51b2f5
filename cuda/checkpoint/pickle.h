// SPDX-License-Identifier: Apache-2.0
//
// Python's pickle format (protocol 2), as much of it as torch.save writes for dicts, lists,
// numbers, text and float tensors. Nothing is executed: an opcode or a global that is not in the
// list below is refused by name, and the known globals only make the values below.
//
//   opcodes   PROTO STOP MARK · NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 BINFLOAT BINUNICODE ·
//             EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 · EMPTY_LIST APPEND APPENDS ·
//             EMPTY_DICT SETITEM SETITEMS · BINPUT LONG_BINPUT BINGET LONG_BINGET ·
//             GLOBAL BINPERSID REDUCE
//   globals   torch FloatStorage, torch._utils _rebuild_tensor_v2, collections OrderedDict (empty)
//
// Values refer to each other by number, so that one that is used a million times is there once, and
// one that contains itself is only odd: whoever reads a tree asks for what it expects, level by
// level, and never walks it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"

namespace crumb::checkpoint {

inline constexpr size_t kMaxPickleBytes = size_t{4} << 20;
inline constexpr size_t kMaxTensorRank = 8;

using PickleRef = uint32_t;  // An index into PickleTree::values.

struct PickleNone {};
struct PickleTuple {
  std::vector<PickleRef> items;
};
struct PickleList {
  std::vector<PickleRef> items;
};
struct PickleDict {
  std::vector<std::pair<PickleRef, PickleRef>> items;  // In the order of writing; keys may repeat.
};
enum class PickleGlobal : uint8_t { kFloatStorage, kRebuildTensor, kOrderedDict };
struct PickleStorage {
  PickleRef key = 0;  // Text: the storage is the zip entry data/{key}.
  uint64_t num_elements = 0;
};
// A view of a storage, in elements. Not yet held against the storage's bytes.
struct PickleTensor {
  PickleStorage storage;
  uint64_t offset = 0;
  std::vector<uint64_t> shape;    // At most kMaxTensorRank.
  std::vector<uint64_t> strides;  // As many.
};

using PickleValue = std::variant<PickleNone,
                                 bool,
                                 int64_t,
                                 double,
                                 std::string,
                                 PickleTuple,
                                 PickleList,
                                 PickleDict,
                                 PickleGlobal,
                                 PickleStorage,
                                 PickleTensor>;
std::string_view TypeName(const PickleValue& value);  // "a dict".

struct PickleTree {
  std::vector<PickleValue> values;
  PickleRef root = 0;

  // The value if it is of this type, or null.
  template <typename Value>
  const Value* Get(PickleRef ref) const {
    return std::get_if<Value>(&values[ref]);
  }
  // The last value of `dict` under the text `key`, or null.
  const PickleValue* Find(const PickleDict& dict, std::string_view key) const;
};

// INVALID_ARGUMENT names the byte, the opcode or the global, and the limit. Time and memory are
// proportional to the bytes.
absl::StatusOr<PickleTree> ParsePickle(std::span<const std::byte> pickle);

// "REDUCE"; "unknown" for bytes that are no opcode of any protocol.
std::string_view PickleOpcodeName(uint8_t opcode);

}  // namespace crumb::checkpoint
