// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/example/gguf_file.h"
#include "proto/base/status_macros.h"

namespace crumb::example {
static_assert(std::endian::native == std::endian::little, "GGUF is read as it lies in memory");

namespace {

constexpr uint32_t kMagic = 0x46554747;  // "GGUF"
constexpr uint32_t kMaxDims = 4;
constexpr uint64_t kDefaultAlignment = 32;
constexpr int64_t kMaxAlignment = 1 << 20;

// The types of metadata values, by their number in the file.
enum ValueType : uint32_t {
  kUint8 = 0,
  kInt8 = 1,
  kUint16 = 2,
  kInt16 = 3,
  kUint32 = 4,
  kInt32 = 5,
  kFloat32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kUint64 = 10,
  kInt64 = 11,
  kFloat64 = 12,
};

// Walks over the file from its start. Every read is checked against what is left.
class Parser {
 public:
  explicit Parser(std::span<const std::byte> bytes) : bytes_(bytes) {}

  absl::StatusOr<GgufContents> Parse() {
    CRUMB_ASSIGN_OR_RETURN(const auto magic, Read<uint32_t>("magic"));
    if (magic != kMagic) {
      return Malformed("it does not start with \"GGUF\"");
    }
    CRUMB_ASSIGN_OR_RETURN(const auto version, Read<uint32_t>("version"));
    if (version != 2 && version != 3) {
      return Malformed(absl::StrCat("version ", version, " is not known, only 2 and 3 are"));
    }
    // The least that an entry takes: a key's length, its type and one byte; a tensor's length of
    // name, number of dimensions, type and offset.
    CRUMB_ASSIGN_OR_RETURN(const uint64_t num_tensors, ReadCount("number of tensors", 24));
    CRUMB_ASSIGN_OR_RETURN(const uint64_t num_keys, ReadCount("number of keys", 13));
    for (uint64_t i = 0; i < num_keys; ++i) {
      CRUMB_RETURN_IF_ERROR(ParseKey());
    }
    std::vector<Placement> placements;
    for (uint64_t i = 0; i < num_tensors; ++i) {
      CRUMB_RETURN_IF_ERROR(ParseTensor(placements));
    }
    CRUMB_RETURN_IF_ERROR(PlaceTensors(placements));
    return std::move(contents_);
  }

 private:
  // A tensor's bytes are found only once the end of the header is known.
  struct Placement {
    GgufTensor tensor;
    uint64_t offset = 0;
    uint64_t num_bytes = 0;
  };

  static absl::Status Malformed(absl::string_view what) { return absl::InvalidArgumentError(what); }
  uint64_t left() const { return bytes_.size() - position_; }

  absl::Status Need(absl::string_view what, uint64_t num_bytes) const {
    if (num_bytes > left()) {
      return Malformed(absl::StrCat(what, " at byte ", position_, " needs ", num_bytes,
                                    " bytes, the file has ", left(), " more; it is truncated or ",
                                    "its lengths are wrong"));
    }
    return absl::OkStatus();
  }

  template <typename T>
  absl::StatusOr<T> Read(absl::string_view what) {
    CRUMB_RETURN_IF_ERROR(Need(what, sizeof(T)));
    T value;
    std::memcpy(&value, bytes_.data() + position_, sizeof(T));
    position_ += sizeof(T);
    return value;
  }

  // A count of things that take at least `least_bytes` each in what is left of the file.
  absl::StatusOr<uint64_t> ReadCount(absl::string_view what, uint64_t least_bytes) {
    CRUMB_ASSIGN_OR_RETURN(const auto count, Read<uint64_t>(what));
    if (count > left() / least_bytes) {
      return Malformed(absl::StrCat(what, " is ", count, ", the ", left(),
                                    " bytes that are left hold at most ", left() / least_bytes));
    }
    return count;
  }

  absl::StatusOr<std::string> ReadString(absl::string_view what) {
    CRUMB_ASSIGN_OR_RETURN(const uint64_t length, ReadCount(what, 1));
    std::string text(reinterpret_cast<const char*>(bytes_.data() + position_), length);
    position_ += length;
    return text;
  }

  absl::StatusOr<int64_t> ReadInteger(uint32_t type, absl::string_view key) {
    const auto widen = [](auto value) -> absl::StatusOr<int64_t> {
      if (!value.ok()) {
        return value.status();
      }
      return static_cast<int64_t>(*value);
    };
    switch (type) {
      case kUint8:
        return widen(Read<uint8_t>(key));
      case kInt8:
        return widen(Read<int8_t>(key));
      case kUint16:
        return widen(Read<uint16_t>(key));
      case kInt16:
        return widen(Read<int16_t>(key));
      case kUint32:
        return widen(Read<uint32_t>(key));
      case kInt32:
        return widen(Read<int32_t>(key));
      case kUint64:
        return widen(Read<uint64_t>(key));
      case kInt64:
        return widen(Read<int64_t>(key));
      default:
        return Malformed(absl::StrCat("key ", key, " has the unknown type ", type));
    }
  }

  absl::StatusOr<double> ReadFloat(uint32_t type, absl::string_view key) {
    if (type == kFloat32) {
      CRUMB_ASSIGN_OR_RETURN(const auto value, Read<float>(key));
      return double{value};
    }
    return Read<double>(key);
  }

  template <typename T, typename ReadOne>
  absl::StatusOr<GgufValue> ReadElements(absl::string_view key, uint64_t least, ReadOne read_one) {
    CRUMB_ASSIGN_OR_RETURN(const uint64_t count, ReadCount(key, least));
    std::vector<T> elements;
    elements.reserve(count);
    for (uint64_t i = 0; i < count; ++i) {
      CRUMB_ASSIGN_OR_RETURN(T element, read_one());
      elements.push_back(std::move(element));
    }
    return elements;
  }

  absl::StatusOr<GgufValue> ReadArray(absl::string_view key) {
    CRUMB_ASSIGN_OR_RETURN(const auto type, Read<uint32_t>(key));
    switch (type) {
      case kString:
        return ReadElements<std::string>(key, sizeof(uint64_t), [&] { return ReadString(key); });
      case kFloat32:
      case kFloat64:
        return ReadElements<double>(key, sizeof(float), [&] { return ReadFloat(type, key); });
      case kArray:
        return Malformed(absl::StrCat("key ", key, " is an array of arrays, which none here is"));
      default:
        return ReadElements<int64_t>(
            key, 1, [&] { return ReadInteger(type == kBool ? kUint8 : type, key); });
    }
  }

  absl::StatusOr<GgufValue> ReadValue(absl::string_view key) {
    CRUMB_ASSIGN_OR_RETURN(const auto type, Read<uint32_t>(key));
    switch (type) {
      case kString:
        return ReadString(key);
      case kFloat32:
      case kFloat64:
        return ReadFloat(type, key);
      case kArray:
        return ReadArray(key);
      case kBool: {
        CRUMB_ASSIGN_OR_RETURN(const auto value, Read<uint8_t>(key));
        return GgufValue(value != 0);
      }
      default:
        return ReadInteger(type, key);
    }
  }

  absl::Status ParseKey() {
    CRUMB_ASSIGN_OR_RETURN(std::string key, ReadString("a key"));
    CRUMB_ASSIGN_OR_RETURN(GgufValue value, ReadValue(key));
    if (!contents_.metadata.emplace(key, std::move(value)).second) {
      return Malformed(absl::StrCat("key ", key, " is there twice"));
    }
    return absl::OkStatus();
  }

  absl::Status ParseTensor(std::vector<Placement>& placements) {
    Placement placement;
    GgufTensor& tensor = placement.tensor;
    CRUMB_ASSIGN_OR_RETURN(tensor.name, ReadString("a tensor's name"));
    const std::string what = absl::StrCat("tensor ", tensor.name);
    CRUMB_ASSIGN_OR_RETURN(const auto num_dims, Read<uint32_t>(what));
    if (num_dims < 1 || num_dims > kMaxDims) {
      return Malformed(absl::StrCat(what, " has ", num_dims, " dimensions, 1 to 4 are possible"));
    }
    uint64_t num_elements = 1;
    for (uint32_t i = 0; i < num_dims; ++i) {
      CRUMB_ASSIGN_OR_RETURN(const auto dim, Read<uint64_t>(what));
      // Eight elements a byte is denser than any format, so a product within this cannot overflow.
      if (dim == 0 || dim > bytes_.size() * 8 / num_elements) {
        return Malformed(absl::StrCat(what, " has dimension ", i, " = ", dim,
                                      ", more than a file of ", bytes_.size(), " bytes can hold"));
      }
      num_elements *= dim;
      tensor.dims.push_back(dim);
    }
    CRUMB_ASSIGN_OR_RETURN(const auto type, Read<uint32_t>(what));
    const absl::StatusOr<GgmlTypeInfo> info = FindGgmlType(type);
    if (!info.ok()) {
      return Malformed(absl::StrCat(what, ": ", info.status().message()));
    }
    if (tensor.dims[0] % info->block_elements != 0) {
      return Malformed(absl::StrCat(what, " has rows of ", tensor.dims[0], " elements, ",
                                    info->name, " packs ", info->block_elements, " at a time"));
    }
    tensor.type = info->type;
    CRUMB_ASSIGN_OR_RETURN(placement.offset, Read<uint64_t>(what));
    placement.num_bytes = num_elements / info->block_elements * info->block_bytes;
    placements.push_back(std::move(placement));
    return absl::OkStatus();
  }

  absl::Status PlaceTensors(std::vector<Placement>& placements) {
    uint64_t alignment = kDefaultAlignment;
    if (const auto found = contents_.metadata.find("general.alignment");
        found != contents_.metadata.end()) {
      const auto* value = std::get_if<int64_t>(&found->second);
      if (value == nullptr || *value < 1 || *value > kMaxAlignment) {
        return Malformed(
            absl::StrCat("general.alignment must be an integer from 1 to ", kMaxAlignment));
      }
      alignment = static_cast<uint64_t>(*value);
    }
    const uint64_t start = (position_ + alignment - 1) / alignment * alignment;
    const uint64_t data_bytes = start < bytes_.size() ? bytes_.size() - start : 0;
    for (Placement& placement : placements) {
      GgufTensor& tensor = placement.tensor;
      if (placement.offset % alignment != 0 || placement.num_bytes > data_bytes ||
          placement.offset > data_bytes - placement.num_bytes) {
        return Malformed(absl::StrCat(
            "tensor ", tensor.name, " lies at bytes [", placement.offset, ", ", placement.offset,
            " + ", placement.num_bytes, ") of the data, which has ", data_bytes,
            " bytes aligned to ", alignment, "; the file is truncated or its offsets are wrong"));
      }
      tensor.bytes = bytes_.subspan(start + placement.offset, placement.num_bytes);
      std::string name = tensor.name;
      if (!contents_.tensors.emplace(name, std::move(tensor)).second) {
        return Malformed(absl::StrCat("tensor ", name, " is there twice"));
      }
    }
    return absl::OkStatus();
  }

  const std::span<const std::byte> bytes_;
  uint64_t position_ = 0;
  GgufContents contents_;
};

}  // namespace

absl::StatusOr<GgufContents> ParseGguf(std::span<const std::byte> bytes) {
  return Parser(bytes).Parse();
}

}  // namespace crumb::example
