// SPDX-License-Identifier: Apache-2.0
#include "cuda/profile/safetensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "proto/base/check.h"
#include "proto/base/status_macros.h"

#include <nlohmann/json.hpp>

namespace crumb {
namespace {

using Json = nlohmann::json;

constexpr size_t kLengthBytes = 8;
constexpr char kMetadataKey[] = "__metadata__";

template <typename... Parts>
absl::Status Malformed(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("safetensors: ", parts...));
}

template <typename... Parts>
absl::Status BadTensor(const std::string& name, const Parts&... parts) {
  return Malformed("tensor '", Printable(name), "': ", parts...);
}

uint64_t LoadLittleEndian(std::span<const std::byte> bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    value |= static_cast<uint64_t>(bytes[i]) << (8 * i);
  }
  return value;
}

absl::StatusOr<std::string_view> HeaderOf(std::span<const std::byte> file) {
  if (file.size() < kLengthBytes) {
    return Malformed("the file has ", file.size(),
                     " bytes, and the length of its header alone takes ", kLengthBytes);
  }
  const uint64_t length = LoadLittleEndian(file);
  if (length > Safetensors::kMaxHeaderBytes) {
    return Malformed("the header says it has ", length, " bytes; at most ",
                     Safetensors::kMaxHeaderBytes, " are allowed");
  }
  if (length > file.size() - kLengthBytes) {
    return Malformed("the header says it has ", length, " bytes, but ", file.size() - kLengthBytes,
                     " follow; the file is truncated");
  }
  return std::string_view(reinterpret_cast<const char*>(file.data()) + kLengthBytes, length);
}

// The parser keeps the last of equal keys without a word; two readers could then see two files.
// Depth stops at what the format has, so that no nesting makes the tree large.
absl::StatusOr<Json> ParseHeader(std::string_view header) {
  constexpr int kMaxDepth = 3;  // Object, tensor, array.
  std::vector<std::set<std::string>> keys(kMaxDepth + 1);
  absl::Status problem;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > kMaxDepth && problem.ok()) {
      problem = Malformed("the header nests deeper than ", kMaxDepth, " levels");
    }
    if (!problem.ok()) {
      return false;
    }
    const auto level = static_cast<size_t>(depth);
    if (event == Json::parse_event_t::object_start && level < keys.size() - 1) {
      keys[level + 1].clear();
    } else if (event == Json::parse_event_t::key &&
               !keys[level].insert(parsed.get<std::string>()).second) {
      problem = Malformed("the header has '", Printable(parsed.get<std::string>()), "' twice");
    }
    return problem.ok();
  };
  Json tree = Json::parse(header, watch, /*allow_exceptions=*/false);
  CRUMB_RETURN_IF_ERROR(problem);
  if (!tree.is_object()) {
    return Malformed("the header is not a JSON object");
  }
  return tree;
}

absl::StatusOr<std::map<std::string, std::string>> ParseMetadata(const Json& entry) {
  if (!entry.is_object()) {
    return Malformed(kMetadataKey, " is not a JSON object");
  }
  std::map<std::string, std::string> metadata;
  for (const auto& [key, value] : entry.items()) {
    if (!value.is_string()) {
      return Malformed("metadata '", Printable(key), "' is not a string");
    }
    metadata.emplace(key, value.get<std::string>());
  }
  return metadata;
}

absl::StatusOr<TensorType> ParseType(const std::string& name, const Json& entry) {
  const auto dtype = entry.find("dtype");
  if (dtype == entry.end() || !dtype->is_string()) {
    return BadTensor(name, "has no dtype");
  }
  const auto text = dtype->get<std::string>();
  for (const TensorType type : {TensorType::kF32, TensorType::kF64}) {
    if (text == TensorTypeName(type)) {
      return type;
    }
  }
  return BadTensor(name, "dtype '", Printable(text), "' is not F32 or F64");
}

absl::StatusOr<std::vector<uint64_t>> ParseNumbers(const std::string& name,
                                                   const Json& entry,
                                                   const char* field,
                                                   size_t max_count) {
  const auto found = entry.find(field);
  if (found == entry.end() || !found->is_array()) {
    return BadTensor(name, "has no list ", field);
  }
  if (found->size() > max_count) {
    return BadTensor(name, field, " has ", found->size(), " entries; at most ", max_count,
                     " are allowed");
  }
  std::vector<uint64_t> numbers;
  for (const Json& number : *found) {
    if (!number.is_number_unsigned()) {
      return BadTensor(name, field, " holds something that is not a whole number from 0 to 2^64-1");
    }
    numbers.push_back(number.get<uint64_t>());
  }
  return numbers;
}

// Nothing if it is not a number of 64 bits.
std::optional<uint64_t> BytesOf(TensorType type, std::span<const uint64_t> shape) {
  uint64_t bytes = TensorTypeBytes(type);
  for (const uint64_t extent : shape) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) {
      return std::nullopt;
    }
  }
  return bytes;
}

absl::StatusOr<Tensor> ParseTensor(const std::string& name,
                                   const Json& entry,
                                   std::span<const std::byte> data) {
  if (!entry.is_object() || entry.size() != 3) {
    return BadTensor(name, "is not an object of dtype, shape and data_offsets");
  }
  Tensor tensor;
  CRUMB_ASSIGN_OR_RETURN(tensor.type, ParseType(name, entry));
  CRUMB_ASSIGN_OR_RETURN(tensor.shape, ParseNumbers(name, entry, "shape", Safetensors::kMaxRank));
  CRUMB_ASSIGN_OR_RETURN(const std::vector<uint64_t> offsets,
                         ParseNumbers(name, entry, "data_offsets", 2));
  if (offsets.size() != 2 || offsets[0] > offsets[1]) {
    return BadTensor(name, "data_offsets ", ShapeText(offsets), " are not a begin and an end");
  }
  if (offsets[1] > data.size()) {
    return BadTensor(name, "shape ", ShapeText(tensor.shape), " ends at byte ", offsets[1],
                     " of the data, but the file has ", data.size(),
                     " bytes of data; the file is truncated");
  }
  const std::optional<uint64_t> bytes = BytesOf(tensor.type, tensor.shape);
  if (!bytes.has_value()) {
    return BadTensor(name, "shape ", ShapeText(tensor.shape), " has more than 2^64 bytes");
  }
  if (*bytes != offsets[1] - offsets[0]) {
    return BadTensor(name, "shape ", ShapeText(tensor.shape), " of ",
                     std::string(TensorTypeName(tensor.type)), " has ", *bytes,
                     " bytes, but its data_offsets ", ShapeText(offsets), " span ",
                     offsets[1] - offsets[0]);
  }
  tensor.data = data.subspan(offsets[0], *bytes);
  return tensor;
}

// Each byte of the data belongs to one tensor.
absl::Status CheckTiling(const Safetensors& contents, std::span<const std::byte> data) {
  struct Extent {
    size_t begin;
    size_t end;
    const std::string* name;
  };
  std::vector<Extent> extents;
  for (const auto& [name, tensor] : contents.tensors) {
    const auto begin = static_cast<size_t>(tensor.data.data() - data.data());
    extents.push_back({begin, begin + tensor.data.size(), &name});
  }
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  size_t at = 0;
  for (const Extent& extent : extents) {
    if (extent.begin != at) {
      return BadTensor(*extent.name, "begins at byte ", extent.begin, " of the data where ", at,
                       " is expected; ",
                       extent.begin < at ? "it overlaps another" : "there is a gap before it");
    }
    at = extent.end;
  }
  if (at != data.size()) {
    return Malformed("the tensors take ", at, " bytes, but the file has ", data.size(),
                     " bytes of data");
  }
  return absl::OkStatus();
}

template <typename Element>
absl::Status CopyTensor(const std::string& name,
                        const Tensor& tensor,
                        TensorType type,
                        std::span<const uint64_t> shape,
                        std::span<Element> out) {
  if (tensor.type != type || !std::ranges::equal(tensor.shape, shape)) {
    return BadTensor(name, "is ", std::string(TensorTypeName(tensor.type)), " ",
                     ShapeText(tensor.shape), ", expected ", std::string(TensorTypeName(type)), " ",
                     ShapeText(shape));
  }
  CRUMB_CHECK(out.size_bytes() == tensor.data.size(), "the target has another size");
  std::memcpy(out.data(), tensor.data.data(), tensor.data.size());
  const auto bad = std::ranges::find_if_not(out, [](Element x) { return std::isfinite(x); });
  if (bad != out.end()) {
    return BadTensor(name, ShapeText(shape), ": element ", bad - out.begin(), " is ",
                     std::isnan(*bad) ? "NaN" : "infinite", "; all must be finite");
  }
  return absl::OkStatus();
}

}  // namespace

std::string_view TensorTypeName(TensorType type) {
  return type == TensorType::kF32 ? "F32" : "F64";
}

std::string ShapeText(std::span<const uint64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape.begin(), shape.end(), ", "), "]");
}

std::string Printable(std::string_view text) {
  constexpr size_t kMaxChars = 64;
  const std::string head(text.substr(0, kMaxChars));
  return absl::StrCat(absl::CHexEscape(head), text.size() > kMaxChars ? "..." : "");
}

absl::StatusOr<Safetensors> ParseSafetensors(std::span<const std::byte> file) {
  CRUMB_ASSIGN_OR_RETURN(const std::string_view header, HeaderOf(file));
  const auto data = file.subspan(kLengthBytes + header.size());
  CRUMB_ASSIGN_OR_RETURN(const Json tree, ParseHeader(header));
  Safetensors contents;
  for (const auto& [name, entry] : tree.items()) {
    if (name == kMetadataKey) {
      CRUMB_ASSIGN_OR_RETURN(contents.metadata, ParseMetadata(entry));
    } else {
      CRUMB_ASSIGN_OR_RETURN(Tensor tensor, ParseTensor(name, entry, data));
      contents.tensors.emplace(name, std::move(tensor));
    }
  }
  CRUMB_RETURN_IF_ERROR(CheckTiling(contents, data));
  return contents;
}

std::vector<std::byte> SerializeSafetensors(const Safetensors& contents) {
  std::vector<std::pair<const std::string*, const Tensor*>> ordered;
  for (const auto& [name, tensor] : contents.tensors) {
    ordered.emplace_back(&name, &tensor);
  }
  // Wider elements first, so that all are aligned; the map has sorted the names.
  std::stable_sort(ordered.begin(), ordered.end(), [](const auto& a, const auto& b) {
    return TensorTypeBytes(a.second->type) > TensorTypeBytes(b.second->type);
  });

  Json header = Json::object();
  if (!contents.metadata.empty()) {
    header[kMetadataKey] = contents.metadata;
  }
  size_t data_bytes = 0;
  for (const auto& [name, tensor] : ordered) {
    CRUMB_CHECK(BytesOf(tensor->type, tensor->shape) == tensor->data.size(),
                "a tensor's data has other bytes than its shape");
    header[*name] = {{"dtype", std::string(TensorTypeName(tensor->type))},
                     {"shape", tensor->shape},
                     {"data_offsets", {data_bytes, data_bytes + tensor->data.size()}}};
    data_bytes += tensor->data.size();
  }
  std::string text = header.dump(-1, ' ', false, Json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');

  std::vector<std::byte> file;
  file.reserve(kLengthBytes + text.size() + data_bytes);
  for (size_t i = 0; i < kLengthBytes; ++i) {
    file.push_back(static_cast<std::byte>(text.size() >> (8 * i)));
  }
  const auto header_bytes = std::as_bytes(std::span(text));
  file.insert(file.end(), header_bytes.begin(), header_bytes.end());
  for (const auto& [name, tensor] : ordered) {
    file.insert(file.end(), tensor->data.begin(), tensor->data.end());
  }
  return file;
}

absl::Status CopyF32(const std::string& name,
                     const Tensor& tensor,
                     std::span<const uint64_t> shape,
                     std::span<float> out) {
  return CopyTensor(name, tensor, TensorType::kF32, shape, out);
}

absl::Status CopyF64(const std::string& name,
                     const Tensor& tensor,
                     std::span<const uint64_t> shape,
                     std::span<double> out) {
  return CopyTensor(name, tensor, TensorType::kF64, shape, out);
}

}  // namespace crumb
