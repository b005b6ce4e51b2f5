// SPDX-License-Identifier: Apache-2.0
//
// bfloat16 as its 16 bits: the upper half of a float. Rows of K and V travel in it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace crumb {

struct BFloat16 {
  uint16_t bits = 0;

  constexpr float ToFloat() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
  // Rounds to nearest, ties to even. A NaN stays a (quiet) NaN.
  static constexpr BFloat16 FromFloat(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    if ((word & 0x7fffffffu) > 0x7f800000u) {
      return {static_cast<uint16_t>((word >> 16) | 0x0040u)};
    }
    return {static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16)};
  }
  constexpr bool IsFinite() const { return (bits & 0x7f80u) != 0x7f80u; }
  friend constexpr bool operator==(BFloat16, BFloat16) = default;
};
static_assert(sizeof(BFloat16) == 2);

// Whether none of `count` values is NaN or inf. A maximum over all of them, so that it vectorises;
// who finds one looks for it by hand.
inline bool AllFinite(const BFloat16* values, size_t count) {
  int16_t largest = 0;
  for (size_t i = 0; i < count; ++i) {
    largest = std::max(largest, static_cast<int16_t>(values[i].bits & 0x7fffu));
  }
  return largest < 0x7f80;
}

}  // namespace crumb
