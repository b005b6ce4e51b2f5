// SPDX-License-Identifier: Apache-2.0
//
// IEEE binary16 as its 16 bits. The scale and the minimum of every two-bit row are stored in it.
#pragma once

#include <bit>
#include <cstdint>

namespace crumb {

struct Float16 {
  uint16_t bits = 0;

  static constexpr float kMax = 65504.0f;                   // The largest finite value.
  static constexpr float kMinPositive = 1.0f / (1u << 24);  // The smallest (subnormal) above zero.

  constexpr float ToFloat() const {
    const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
    const uint32_t magnitude = bits & 0x7fffu;
    if (magnitude >= 0x7c00u) {  // Infinity and NaN.
      return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    }
    if (magnitude < 0x400u) {  // Zero and subnormals: a whole number of the smallest.
      const float value = static_cast<float>(magnitude) * kMinPositive;
      return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
    }
    return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
  }

  // Rounds to nearest, ties to even; beyond the range, infinity. A NaN stays a (quiet) NaN.
  static constexpr Float16 FromFloat(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (word >> 16) & 0x8000u;
    const uint32_t magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
      return {static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
    }
    if (magnitude >= 0x47800000u) {  // 65536 and more.
      return {static_cast<uint16_t>(sign | 0x7c00u)};
    }
    if (magnitude < 0x38800000u) {  // Below the smallest normal, 2^-14.
      // Adding 0.5 leaves the number of smallest steps, rounded by the adder, in the low bits.
      const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
      return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
    }
    // Rebias, then round; a carry into the exponent is right, up to infinity.
    const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
    return {static_cast<uint16_t>(sign | (rounded >> 13))};
  }

  // FromFloat of the value clamped to the finite range. Never infinity.
  static constexpr Float16 FromFloatSaturated(float value) {
    return FromFloat(value < -kMax ? -kMax : value > kMax ? kMax : value);
  }

  friend constexpr bool operator==(Float16, Float16) = default;
};
static_assert(sizeof(Float16) == 2);

}  // namespace crumb
