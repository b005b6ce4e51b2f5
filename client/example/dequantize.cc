// SPDX-License-Identifier: Apache-2.0
#include "client/example/dequantize.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "proto/base/check.h"
#include "proto/base/float16.h"

namespace crumb::example {
namespace {

constexpr std::array<GgmlTypeInfo, 7> kTypes = {{
    {GgmlType::kF32, "F32", 1, 4},
    {GgmlType::kF16, "F16", 1, 2},
    {GgmlType::kQ40, "Q4_0", 32, 18},
    {GgmlType::kQ41, "Q4_1", 32, 20},
    {GgmlType::kQ80, "Q8_0", 32, 34},
    {GgmlType::kQ4K, "Q4_K", 256, 144},
    {GgmlType::kQ6K, "Q6_K", 256, 210},
}};

float HalfAt(const uint8_t* bytes) {
  Float16 half;
  std::memcpy(&half, bytes, sizeof(half));
  return half.ToFloat();
}

// 32 elements of four bits: the low nibbles are the first half, the high ones the second.
void ExpandNibbles(const uint8_t* nibbles, float scale, float offset, float* out) {
  for (int i = 0; i < 16; ++i) {
    out[i] = scale * static_cast<float>(nibbles[i] & 15) + offset;
    out[i + 16] = scale * static_cast<float>(nibbles[i] >> 4) + offset;
  }
}

// Block {half d; uint8 nibbles[16]}.
void ExpandQ40(const uint8_t* block, float* out) {
  const float scale = HalfAt(block);
  ExpandNibbles(block + 2, scale, -8 * scale, out);
}

// Block {half d; half m; uint8 nibbles[16]}.
void ExpandQ41(const uint8_t* block, float* out) {
  ExpandNibbles(block + 4, HalfAt(block), HalfAt(block + 2), out);
}

// Block {half d; int8 q[32]}.
void ExpandQ80(const uint8_t* block, float* out) {
  const float scale = HalfAt(block);
  for (int i = 0; i < 32; ++i) {
    out[i] = scale * static_cast<float>(static_cast<int8_t>(block[2 + i]));
  }
}

// Block {half d; half dmin; uint8 scales[12]; uint8 nibbles[128]}: eight groups of 32, each with a
// scale and a minimum of six bits. Groups 0..3 keep theirs in the low six bits of bytes 0..7;
// groups 4..7 have four bits in bytes 8..11 and two in the upper bits of bytes 0..7.
void ExpandQ4K(const uint8_t* block, float* out) {
  const float d = HalfAt(block);
  const float dmin = HalfAt(block + 2);
  const uint8_t* packed = block + 4;
  const uint8_t* nibbles = block + 16;
  for (int group = 0; group < 8; ++group) {
    int scale = 0;
    int minimum = 0;
    if (group < 4) {
      scale = packed[group] & 63;
      minimum = packed[group + 4] & 63;
    } else {
      scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6 << 4);
      minimum = (packed[group + 4] >> 4) | (packed[group] >> 6 << 4);
    }
    const float step = d * static_cast<float>(scale);
    const float offset = -dmin * static_cast<float>(minimum);
    // A pair of groups shares 32 bytes: the even one has the low nibbles, the odd one the high.
    const uint8_t* source = nibbles + ptrdiff_t{32} * (group / 2);
    for (int i = 0; i < 32; ++i) {
      const int code = group % 2 == 0 ? source[i] & 15 : source[i] >> 4;
      out[32 * group + i] = step * static_cast<float>(code) + offset;
    }
  }
}

// Block {uint8 low[128]; uint8 high[64]; int8 scales[16]; half d}: codes of six bits, four in `low`
// and two in `high`, in two halves of 128 elements; a scale for each 16 elements.
void ExpandQ6K(const uint8_t* block, float* out) {
  const float d = HalfAt(block + 208);
  for (int i = 0; i < 256; ++i) {
    const int half = i / 128;
    const int quarter = i % 128 / 32;
    const int lane = i % 32;
    const uint8_t low = block[64 * half + 32 * (quarter % 2) + lane];
    const uint8_t high = block[128 + 32 * half + lane];
    const int code = (quarter < 2 ? low & 15 : low >> 4) | ((high >> (2 * quarter) & 3) << 4);
    const auto scale = static_cast<int8_t>(block[192 + i / 16]);
    out[i] = d * static_cast<float>(scale) * static_cast<float>(code - 32);
  }
}

}  // namespace

absl::StatusOr<GgmlTypeInfo> FindGgmlType(uint32_t number) {
  std::string known;
  for (const GgmlTypeInfo& info : kTypes) {
    if (static_cast<uint32_t>(info.type) == number) {
      return info;
    }
    absl::StrAppend(&known, known.empty() ? "" : ", ", info.name);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("weights of ggml type ", number, " are not known here, only ", known));
}

void Dequantize(GgmlType type, std::span<const std::byte> bytes, std::span<float> out) {
  const auto* info = std::find_if(kTypes.begin(), kTypes.end(),
                                  [type](const GgmlTypeInfo& other) { return other.type == type; });
  const size_t num_blocks = out.size() / info->block_elements;
  CRUMB_CHECK(
      out.size() % info->block_elements == 0 && bytes.size() == num_blocks * info->block_bytes,
      "a row is a whole number of blocks");
  const auto* block = reinterpret_cast<const uint8_t*>(bytes.data());
  if (type == GgmlType::kF32) {
    std::memcpy(out.data(), block, bytes.size());
    return;
  }
  float* target = out.data();
  for (size_t i = 0; i < num_blocks; ++i) {
    switch (type) {
      case GgmlType::kF32:
        break;
      case GgmlType::kF16:
        *target = HalfAt(block);
        break;
      case GgmlType::kQ40:
        ExpandQ40(block, target);
        break;
      case GgmlType::kQ41:
        ExpandQ41(block, target);
        break;
      case GgmlType::kQ80:
        ExpandQ80(block, target);
        break;
      case GgmlType::kQ4K:
        ExpandQ4K(block, target);
        break;
      case GgmlType::kQ6K:
        ExpandQ6K(block, target);
        break;
    }
    block += info->block_bytes;
    target += info->block_elements;
  }
}

}  // namespace crumb::example
