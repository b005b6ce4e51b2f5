// SPDX-License-Identifier: Apache-2.0
#include "cuda/checkpoint/pickle_machine.h"

#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "cuda/profile/safetensors.h"
#include "proto/base/status_macros.h"

namespace crumb::checkpoint {
namespace {

constexpr uint64_t kProtocol = 2;
constexpr size_t kMaxLineBytes = 256;

struct KnownGlobal {
  std::string_view name;  // "module qualified.name".
  PickleGlobal global;
};
constexpr KnownGlobal kGlobals[] = {
    {"torch FloatStorage", PickleGlobal::kFloatStorage},
    {"torch._utils _rebuild_tensor_v2", PickleGlobal::kRebuildTensor},
    {"collections OrderedDict", PickleGlobal::kOrderedDict},
};

// A group's answer to an opcode that is not its own; never seen outside.
absl::Status NotMine() {
  return absl::UnimplementedError("");
}

}  // namespace

template <typename... Parts>
absl::Status PickleMachine::Refuse(const Parts&... parts) const {
  return absl::InvalidArgumentError(absl::StrCat("pickle: byte ", opcode_at_, ": ", parts...));
}

absl::StatusOr<PickleTree> PickleMachine::Run() {
  if (pickle_.size() > kMaxPickleBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "pickle: it has ", pickle_.size(), " bytes; at most ", kMaxPickleBytes, " are read"));
  }
  CRUMB_ASSIGN_OR_RETURN(const uint64_t opcode, TakeUnsigned(1));
  CRUMB_ASSIGN_OR_RETURN(const uint64_t protocol, TakeUnsigned(1));
  if (opcode != static_cast<uint8_t>(PickleOpcode::kProto) || protocol != kProtocol) {
    return Refuse("it does not begin as protocol ", kProtocol,
                  " does; save the file anew by torch.save with its default pickle_protocol");
  }
  while (true) {
    CRUMB_ASSIGN_OR_RETURN(const bool has_stopped, Step());
    if (has_stopped) {
      return std::move(tree_);
    }
  }
}

absl::StatusOr<bool> PickleMachine::Step() {
  opcode_at_ = at_;
  CRUMB_ASSIGN_OR_RETURN(const uint64_t byte, TakeUnsigned(1));
  const auto opcode = static_cast<PickleOpcode>(byte);
  if (opcode == PickleOpcode::kStop) {
    CRUMB_ASSIGN_OR_RETURN(tree_.root, Pop());
    if (!stack_.empty() || !marks_.empty() || at_ != pickle_.size()) {
      return Refuse("STOP leaves ", stack_.size(), " values on the stack and ",
                    pickle_.size() - at_, " bytes unread; neither may be left");
    }
    return true;
  }
  for (const auto group : {&PickleMachine::Scalar, &PickleMachine::Container, &PickleMachine::Memo,
                           &PickleMachine::Object}) {
    const absl::Status status = (this->*group)(opcode);
    if (!absl::IsUnimplemented(status)) {
      CRUMB_RETURN_IF_ERROR(status);
      return false;
    }
  }
  return Refuse("opcode ", std::string(PickleOpcodeName(static_cast<uint8_t>(byte))),
                absl::StrFormat(" (0x%02x)", byte),
                " is refused: files of rotations do not need it, and others may run code by it");
}

absl::Status PickleMachine::Scalar(PickleOpcode opcode) {
  switch (opcode) {
    case PickleOpcode::kNone:
      return Push(PickleNone{});
    case PickleOpcode::kNewTrue:
      return Push(true);
    case PickleOpcode::kNewFalse:
      return Push(false);
    case PickleOpcode::kBinInt1:
    case PickleOpcode::kBinInt2: {
      CRUMB_ASSIGN_OR_RETURN(const uint64_t value,
                             TakeUnsigned(opcode == PickleOpcode::kBinInt1 ? 1 : 2));
      return Push(static_cast<int64_t>(value));
    }
    case PickleOpcode::kBinInt: {
      CRUMB_ASSIGN_OR_RETURN(const uint64_t value, TakeUnsigned(4));
      return Push(int64_t{static_cast<int32_t>(value)});
    }
    case PickleOpcode::kBinFloat: {
      CRUMB_ASSIGN_OR_RETURN(const auto bytes, Take(8));
      uint64_t bits = 0;  // The one big-endian operand.
      for (const std::byte byte : bytes) {
        bits = bits << 8 | std::to_integer<uint64_t>(byte);
      }
      return Push(std::bit_cast<double>(bits));
    }
    case PickleOpcode::kBinUnicode: {
      CRUMB_ASSIGN_OR_RETURN(const uint64_t length, TakeUnsigned(4));
      CRUMB_ASSIGN_OR_RETURN(const auto bytes, Take(length));
      return Push(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
    }
    default:
      return NotMine();
  }
}

absl::Status PickleMachine::Container(PickleOpcode opcode) {
  std::vector<PickleRef> items;
  switch (opcode) {
    case PickleOpcode::kMark:
      marks_.push_back(stack_.size());
      return absl::OkStatus();
    case PickleOpcode::kEmptyTuple:
      return Push(PickleTuple{});
    case PickleOpcode::kEmptyList:
      return Push(PickleList{});
    case PickleOpcode::kEmptyDict:
      return Push(PickleDict{});
    case PickleOpcode::kTuple: {
      CRUMB_ASSIGN_OR_RETURN(items, PopToMark());
      return Push(PickleTuple{std::move(items)});
    }
    case PickleOpcode::kTuple1:
    case PickleOpcode::kTuple2:
    case PickleOpcode::kTuple3: {
      const int count = static_cast<int>(opcode) - static_cast<int>(PickleOpcode::kTuple1) + 1;
      CRUMB_ASSIGN_OR_RETURN(items, PopCount(static_cast<size_t>(count)));
      return Push(PickleTuple{std::move(items)});
    }
    case PickleOpcode::kSetItem: {
      CRUMB_ASSIGN_OR_RETURN(items, PopCount(2));
      return SetItems(items);
    }
    case PickleOpcode::kSetItems: {
      CRUMB_ASSIGN_OR_RETURN(items, PopToMark());
      return SetItems(items);
    }
    case PickleOpcode::kAppend: {
      CRUMB_ASSIGN_OR_RETURN(items, PopCount(1));
      return AppendItems(items);
    }
    case PickleOpcode::kAppends: {
      CRUMB_ASSIGN_OR_RETURN(items, PopToMark());
      return AppendItems(items);
    }
    default:
      return NotMine();
  }
}

absl::Status PickleMachine::Memo(PickleOpcode opcode) {
  switch (opcode) {
    case PickleOpcode::kBinPut:
    case PickleOpcode::kLongBinPut: {
      CRUMB_ASSIGN_OR_RETURN(const uint64_t slot,
                             TakeUnsigned(opcode == PickleOpcode::kBinPut ? 1 : 4));
      CRUMB_ASSIGN_OR_RETURN(const PickleRef top, Pop());
      stack_.push_back(top);
      memo_[slot] = top;
      return absl::OkStatus();
    }
    case PickleOpcode::kBinGet:
    case PickleOpcode::kLongBinGet: {
      CRUMB_ASSIGN_OR_RETURN(const uint64_t slot,
                             TakeUnsigned(opcode == PickleOpcode::kBinGet ? 1 : 4));
      const auto found = memo_.find(slot);
      if (found == memo_.end()) {
        return Refuse("memo slot ", slot, " is read before it is written");
      }
      stack_.push_back(found->second);
      return absl::OkStatus();
    }
    default:
      return NotMine();
  }
}

absl::Status PickleMachine::Object(PickleOpcode opcode) {
  switch (opcode) {
    case PickleOpcode::kGlobal:
      return Global();
    case PickleOpcode::kBinPersId:
      return Storage();
    case PickleOpcode::kReduce:
      return Reduce();
    default:
      return NotMine();
  }
}

absl::Status PickleMachine::Global() {
  CRUMB_ASSIGN_OR_RETURN(const std::string module, TakeLine());
  CRUMB_ASSIGN_OR_RETURN(const std::string name, TakeLine());
  const std::string full = absl::StrCat(module, " ", name);
  for (const KnownGlobal& known : kGlobals) {
    if (full == known.name) {
      return Push(known.global);
    }
  }
  return Refuse("global '", Printable(full),
                "' is refused; known are torch FloatStorage, torch._utils _rebuild_tensor_v2 and "
                "collections OrderedDict. Tensors of other types: save them anew after .float(); "
                "anything else could run code, so ask where the file comes from");
}

// ('storage', torch.FloatStorage, key, location, number of elements) -> storage.
absl::Status PickleMachine::Storage() {
  CRUMB_ASSIGN_OR_RETURN(const PickleRef ref, Pop());
  const auto* id = tree_.Get<PickleTuple>(ref);
  if (id == nullptr || id->items.size() != 5) {
    return Refuse("BINPERSID of ", std::string(TypeName(tree_.values[ref])),
                  "; a tuple of five, a storage's name, is expected");
  }
  const auto* kind = tree_.Get<std::string>(id->items[0]);
  const auto* type = tree_.Get<PickleGlobal>(id->items[1]);
  const auto* key = tree_.Get<std::string>(id->items[2]);
  if (kind == nullptr || *kind != "storage" || type == nullptr ||
      *type != PickleGlobal::kFloatStorage || key == nullptr) {
    return Refuse("BINPERSID names no storage of floats under a text key");
  }
  CRUMB_ASSIGN_OR_RETURN(const uint64_t elements, Count(id->items[4], "a storage's size"));
  return Push(PickleStorage{.key = id->items[2], .num_elements = elements});
}

absl::Status PickleMachine::Reduce() {
  CRUMB_ASSIGN_OR_RETURN(const std::vector<PickleRef> call, PopCount(2));
  const auto* callee = tree_.Get<PickleGlobal>(call[0]);
  const auto* arguments = tree_.Get<PickleTuple>(call[1]);
  if (callee == nullptr || arguments == nullptr) {
    return Refuse("REDUCE of ", std::string(TypeName(tree_.values[call[0]])), " and ",
                  std::string(TypeName(tree_.values[call[1]])),
                  "; a known global and a tuple are expected");
  }
  if (*callee == PickleGlobal::kOrderedDict && arguments->items.empty()) {
    return Push(PickleDict{});
  }
  if (*callee == PickleGlobal::kRebuildTensor) {
    CRUMB_ASSIGN_OR_RETURN(PickleTensor tensor, Tensor(*arguments));
    return Push(std::move(tensor));
  }
  return Refuse("REDUCE calls a global with arguments that it does not take here");
}

// (storage, offset, size, stride, requires_grad, hooks): the last two change nothing here.
absl::StatusOr<PickleTensor> PickleMachine::Tensor(const PickleTuple& arguments) const {
  const auto& items = arguments.items;
  if (items.size() < 6) {
    return Refuse("a tensor of ", items.size(), " arguments; _rebuild_tensor_v2 takes at least 6");
  }
  const auto* storage = tree_.Get<PickleStorage>(items[0]);
  if (storage == nullptr) {
    return Refuse("a tensor of ", std::string(TypeName(tree_.values[items[0]])),
                  "; a storage is expected");
  }
  PickleTensor tensor{.storage = *storage, .offset = 0, .shape = {}, .strides = {}};
  CRUMB_ASSIGN_OR_RETURN(tensor.offset, Count(items[1], "a tensor's offset"));
  CRUMB_ASSIGN_OR_RETURN(tensor.shape, Extents(items[2], "a tensor's size"));
  CRUMB_ASSIGN_OR_RETURN(tensor.strides, Extents(items[3], "a tensor's stride"));
  if (tensor.shape.size() != tensor.strides.size()) {
    return Refuse("a tensor of ", tensor.shape.size(), " dimensions and ", tensor.strides.size(),
                  " strides; there must be as many");
  }
  return tensor;
}

absl::Status PickleMachine::SetItems(std::span<const PickleRef> items) {
  CRUMB_ASSIGN_OR_RETURN(const PickleRef ref, Pop());
  stack_.push_back(ref);
  auto* dict = std::get_if<PickleDict>(&tree_.values[ref]);
  if (dict == nullptr || items.size() % 2 != 0) {
    return Refuse(items.size(), " items for ", std::string(TypeName(tree_.values[ref])),
                  "; pairs for a dict are expected");
  }
  for (size_t i = 0; i < items.size(); i += 2) {
    dict->items.emplace_back(items[i], items[i + 1]);
  }
  return absl::OkStatus();
}

absl::Status PickleMachine::AppendItems(std::span<const PickleRef> items) {
  CRUMB_ASSIGN_OR_RETURN(const PickleRef ref, Pop());
  stack_.push_back(ref);
  auto* list = std::get_if<PickleList>(&tree_.values[ref]);
  if (list == nullptr) {
    return Refuse(items.size(), " items for ", std::string(TypeName(tree_.values[ref])),
                  "; a list is expected");
  }
  list->items.insert(list->items.end(), items.begin(), items.end());
  return absl::OkStatus();
}

absl::StatusOr<std::span<const std::byte>> PickleMachine::Take(size_t count) {
  if (count > pickle_.size() - at_) {
    return Refuse("it is truncated: ", count, " bytes are to follow byte ", at_, ", ",
                  pickle_.size() - at_, " do");
  }
  const auto bytes = pickle_.subspan(at_, count);
  at_ += count;
  return bytes;
}

absl::StatusOr<uint64_t> PickleMachine::TakeUnsigned(size_t bytes) {
  CRUMB_ASSIGN_OR_RETURN(const auto taken, Take(bytes));
  uint64_t value = 0;
  for (size_t i = 0; i < taken.size(); ++i) {
    value |= std::to_integer<uint64_t>(taken[i]) << (8 * i);
  }
  return value;
}

absl::StatusOr<std::string> PickleMachine::TakeLine() {
  std::string line;
  while (line.size() <= kMaxLineBytes) {
    CRUMB_ASSIGN_OR_RETURN(const auto byte, Take(1));
    if (byte[0] == std::byte{'\n'}) {
      return line;
    }
    line.push_back(std::to_integer<char>(byte[0]));
  }
  return Refuse("a name of more than ", kMaxLineBytes, " bytes: '", Printable(line), "'");
}

absl::StatusOr<PickleRef> PickleMachine::Pop() {
  if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) {
    return Refuse("an opcode takes a value from an empty stack");
  }
  const PickleRef ref = stack_.back();
  stack_.pop_back();
  return ref;
}

absl::StatusOr<std::vector<PickleRef>> PickleMachine::PopToMark() {
  if (marks_.empty()) {
    return Refuse("an opcode looks for a MARK, and there is none");
  }
  const auto first = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
  std::vector<PickleRef> items(first, stack_.end());
  stack_.erase(first, stack_.end());
  marks_.pop_back();
  return items;
}

absl::StatusOr<std::vector<PickleRef>> PickleMachine::PopCount(size_t count) {
  std::vector<PickleRef> items(count);
  for (auto item = items.rbegin(); item != items.rend(); ++item) {
    CRUMB_ASSIGN_OR_RETURN(*item, Pop());
  }
  return items;
}

absl::Status PickleMachine::Push(PickleValue value) {
  stack_.push_back(static_cast<PickleRef>(tree_.values.size()));
  tree_.values.push_back(std::move(value));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<uint64_t>> PickleMachine::Extents(PickleRef ref,
                                                             const char* what) const {
  const auto* tuple = tree_.Get<PickleTuple>(ref);
  if (tuple == nullptr || tuple->items.size() > kMaxTensorRank) {
    return Refuse(what, " is ", std::string(TypeName(tree_.values[ref])), " of ",
                  tuple == nullptr ? 0 : tuple->items.size(), " items; a tuple of at most ",
                  kMaxTensorRank, " integers is expected");
  }
  std::vector<uint64_t> extents;
  for (const PickleRef item : tuple->items) {
    CRUMB_ASSIGN_OR_RETURN(const uint64_t extent, Count(item, what));
    extents.push_back(extent);
  }
  return extents;
}

absl::StatusOr<uint64_t> PickleMachine::Count(PickleRef ref, const char* what) const {
  const auto* number = tree_.Get<int64_t>(ref);
  if (number == nullptr || *number < 0) {
    return Refuse(what, " is ", std::string(TypeName(tree_.values[ref])),
                  number == nullptr ? std::string() : absl::StrCat(", ", *number),
                  "; an integer of 0 or more is expected");
  }
  return static_cast<uint64_t>(*number);
}

}  // namespace crumb::checkpoint
