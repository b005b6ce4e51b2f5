// SPDX-License-Identifier: Apache-2.0
//
// The weight formats of ggml (ggml-common.h, ggml-quants.c; MIT) that this engine reads, to float.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace crumb::example {

// By their number in a GGUF file.
enum class GgmlType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ40 = 2,   // 32 elements: d * (q - 8)
  kQ41 = 3,   // 32 elements: d * q + m
  kQ80 = 8,   // 32 elements: d * q
  kQ4K = 12,  // 256 elements in 8 groups: d * scale * q - dmin * min
  kQ6K = 14,  // 256 elements in 16 groups: d * scale * (q - 32)
};

struct GgmlTypeInfo {
  GgmlType type = GgmlType::kF32;
  absl::string_view name;
  uint32_t block_elements = 1;  // A row is a whole number of blocks.
  uint32_t block_bytes = 4;
};

// INVALID_ARGUMENT names the number and the formats that are known.
absl::StatusOr<GgmlTypeInfo> FindGgmlType(uint32_t number);

// `bytes` holds exactly the blocks of out.size() elements. Thread-safe.
void Dequantize(GgmlType type, std::span<const std::byte> bytes, std::span<float> out);

}  // namespace crumb::example
