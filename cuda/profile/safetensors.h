// SPDX-License-Identifier: Apache-2.0
//
// The safetensors file format (github.com/huggingface/safetensors), as much of it as profiles and
// statistics need: F32 and F64 tensors and a block of string metadata.
//
//   [8 bytes: length n of the header, little-endian][n bytes: JSON][data]
//   header  {"__metadata__": {"key": "value"}, "name": {"dtype": "F32", "shape": [2, 3],
//            "data_offsets": [begin, end]}, ...}     offsets count from the start of the data
//
// The reader trusts nothing: every length, product and offset is checked before it is used, and
// tensors must tile the data exactly, without overlap or gap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace crumb {

enum class TensorType : uint8_t { kF32, kF64 };
std::string_view TensorTypeName(TensorType type);  // "F32", "F64".
constexpr size_t TensorTypeBytes(TensorType type) {
  return type == TensorType::kF32 ? 4 : 8;
}

struct Tensor {
  TensorType type = TensorType::kF32;
  std::vector<uint64_t> shape;      // Row-major; no entries for a scalar.
  std::span<const std::byte> data;  // Of the product of `shape` elements; any alignment.
};

// "[30, 3, 64]".
std::string ShapeText(std::span<const uint64_t> shape);

struct Safetensors {
  static constexpr size_t kMaxHeaderBytes = size_t{1} << 20;
  static constexpr size_t kMaxRank = 8;

  std::map<std::string, std::string> metadata;
  std::map<std::string, Tensor> tensors;
};

// Views into `file`, which must outlive the result. INVALID_ARGUMENT names the tensor or the field,
// what it says and the limit.
absl::StatusOr<Safetensors> ParseSafetensors(std::span<const std::byte> file);

// Deterministic: tensors in the order of element size, then name; header padded to 8 bytes.
// CRUMB_CHECKs that each tensor's data has the bytes of its shape. Text that is not UTF-8 has its
// bad bytes replaced.
std::vector<std::byte> SerializeSafetensors(const Safetensors& contents);

// Text from a file, made fit for a message: escaped and cut to a length that can be read.
std::string Printable(std::string_view text);

// The floats of an F32 tensor of this shape. INVALID_ARGUMENT names the tensor for another type or
// shape, and the index of the first value that is NaN or infinite.
absl::Status CopyF32(const std::string& name,
                     const Tensor& tensor,
                     std::span<const uint64_t> shape,
                     std::span<float> out);
absl::Status CopyF64(const std::string& name,
                     const Tensor& tensor,
                     std::span<const uint64_t> shape,
                     std::span<double> out);

}  // namespace crumb
