// SPDX-License-Identifier: Apache-2.0
#include "cuda/calibrate/reservoir_file.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"

#include "proto/base/status_macros.h"

namespace crumb::calibrate {
namespace {

constexpr char kPrefix[] = "reservoir.";
constexpr char kKeyTokens[] = "reservoir.key_tokens";
constexpr char kQueryTokens[] = "reservoir.query_tokens";

template <typename... Parts>
absl::Status Refuse(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("statistics: ", parts...));
}

// The F32 tensors: [L, H, rows] and, but for lse, a dim.
struct RowsName {
  const char* tensor;
  std::vector<float> Reservoir::*member;
  bool is_of_keys;          // A row a key, not a query.
  uint32_t Geometry::*dim;  // nullptr: a number a row.
};

constexpr RowsName kRows[] = {
    {"reservoir.keys", &Reservoir::keys, true, &Geometry::key_dim},
    {"reservoir.values", &Reservoir::values, true, &Geometry::value_dim},
    {"reservoir.queries", &Reservoir::queries, false, &Geometry::key_dim},
    {"reservoir.outputs", &Reservoir::outputs, false, &Geometry::value_dim},
    {"reservoir.lse", &Reservoir::lse, false, nullptr},
};

std::vector<uint64_t> ShapeOf(const RowsName& rows,
                              const Geometry& geometry,
                              const Reservoir& reservoir) {
  std::vector<uint64_t> shape = {
      geometry.num_layers, geometry.num_kv_heads,
      rows.is_of_keys ? reservoir.key_tokens.size() : reservoir.query_tokens.size()};
  if (rows.dim != nullptr) {
    shape.push_back(geometry.*rows.dim);
  }
  return shape;
}

absl::StatusOr<Tensor> Take(const char* name, Safetensors* contents) {
  const auto node = contents->tensors.extract(name);
  if (node.empty()) {
    return Refuse("tensor '", name, "' is missing beside the reservoir's others");
  }
  return node.mapped();
}

absl::StatusOr<std::vector<Reservoir::Token>> TakeTokens(const char* name,
                                                         uint32_t max_rows,
                                                         Safetensors* contents) {
  CRUMB_ASSIGN_OR_RETURN(const Tensor tensor, Take(name, contents));
  const std::vector<uint64_t>& shape = tensor.shape;
  if (tensor.type != TensorType::kF64 || shape.size() != 2 || shape[0] < 1 || shape[0] > max_rows ||
      shape[1] != 2) {
    return Refuse("tensor '", name, "' is ", std::string(TensorTypeName(tensor.type)), " ",
                  ShapeText(shape), ", expected F64 [rows, 2] of 1 to ", max_rows, " rows");
  }
  std::vector<double> numbers(shape[0] * 2);
  CRUMB_RETURN_IF_ERROR(CopyF64(name, tensor, shape, numbers));
  std::vector<Reservoir::Token> tokens;
  for (size_t row = 0; row < shape[0]; ++row) {
    const double text = numbers[2 * row];
    const double position = numbers[2 * row + 1];
    if (!IsCount(text) || !IsCount(position)) {
      return Refuse("tensor '", name, "': row ", row, " is (", text, ", ", position,
                    "); a text and a position are whole numbers below 2^32");
    }
    tokens.push_back({static_cast<uint32_t>(text), static_cast<uint32_t>(position)});
    if (row > 0 && !(tokens[row - 1] < tokens[row])) {
      return Refuse("tensor '", name, "': row ", row, ", text ", text, ", position ", position,
                    ", does not come after the row before it; rows ascend by text, then position");
    }
  }
  return tokens;
}

}  // namespace

bool IsCount(double number) {
  return number >= 0 && number <= std::numeric_limits<uint32_t>::max() &&
         number == std::floor(number);
}

absl::Status ReadReservoir(const Geometry& geometry, Safetensors* contents, Reservoir* reservoir) {
  const auto first = contents->tensors.lower_bound(kPrefix);
  if (first == contents->tensors.end() || !first->first.starts_with(kPrefix)) {
    return absl::OkStatus();
  }
  CRUMB_ASSIGN_OR_RETURN(reservoir->key_tokens,
                         TakeTokens(kKeyTokens, Reservoir::kKeyRows, contents));
  CRUMB_ASSIGN_OR_RETURN(reservoir->query_tokens,
                         TakeTokens(kQueryTokens, Reservoir::kQueryRows, contents));
  std::set<uint32_t> texts;
  for (const Reservoir::Token& token : reservoir->key_tokens) {
    texts.insert(token.text);
  }
  for (const Reservoir::Token& token : reservoir->query_tokens) {
    if (!texts.contains(token.text)) {
      return Refuse("tensor '", kQueryTokens, "' has text ", token.text,
                    ", of which there are no keys");
    }
  }
  for (const RowsName& rows : kRows) {
    CRUMB_ASSIGN_OR_RETURN(const Tensor tensor, Take(rows.tensor, contents));
    const std::vector<uint64_t> shape = ShapeOf(rows, geometry, *reservoir);
    // Sized by what is in the file, not by what its metadata promises.
    if (tensor.type != TensorType::kF32 || tensor.shape != shape) {
      return Refuse("tensor '", rows.tensor, "' is ", std::string(TensorTypeName(tensor.type)), " ",
                    ShapeText(tensor.shape), ", expected F32 ", ShapeText(shape));
    }
    (reservoir->*rows.member).resize(tensor.data.size() / sizeof(float));
    CRUMB_RETURN_IF_ERROR(CopyF32(rows.tensor, tensor, shape, reservoir->*rows.member));
  }
  return absl::OkStatus();
}

ReservoirTokens::ReservoirTokens(const Reservoir& reservoir) {
  for (const auto& [from, to] :
       {std::pair(&reservoir.key_tokens, &keys), std::pair(&reservoir.query_tokens, &queries)}) {
    for (const Reservoir::Token& token : *from) {
      to->push_back(token.text);
      to->push_back(token.position);
    }
  }
}

absl::Status AddReservoir(const Geometry& geometry,
                          const Reservoir& reservoir,
                          const ReservoirTokens& tokens,
                          Safetensors* contents) {
  if (reservoir.key_tokens.empty() && reservoir.query_tokens.empty()) {
    return absl::OkStatus();
  }
  CRUMB_RETURN_IF_ERROR(Add(kKeyTokens, TensorType::kF64, {reservoir.key_tokens.size(), 2},
                            std::as_bytes(std::span(tokens.keys)), contents));
  CRUMB_RETURN_IF_ERROR(Add(kQueryTokens, TensorType::kF64, {reservoir.query_tokens.size(), 2},
                            std::as_bytes(std::span(tokens.queries)), contents));
  for (const RowsName& rows : kRows) {
    CRUMB_RETURN_IF_ERROR(Add(rows.tensor, TensorType::kF32, ShapeOf(rows, geometry, reservoir),
                              std::as_bytes(std::span(reservoir.*rows.member)), contents));
  }
  return absl::OkStatus();
}

absl::Status Add(const char* name,
                 TensorType type,
                 std::vector<uint64_t> shape,
                 std::span<const std::byte> data,
                 Safetensors* contents) {
  size_t count = 1;
  for (const uint64_t extent : shape) {
    count *= extent;
  }
  if (data.size() != count * TensorTypeBytes(type)) {
    return Refuse(name, " has ", data.size() / TensorTypeBytes(type),
                  " values; its geometry asks for ", count);
  }
  contents->tensors[name] = {.type = type, .shape = std::move(shape), .data = data};
  return absl::OkStatus();
}

}  // namespace crumb::calibrate
