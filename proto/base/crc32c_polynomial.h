// SPDX-License-Identifier: Apache-2.0
//
// Arithmetic modulo Castagnoli's polynomial, in CRC-32C's order of bits: bit 31 - i has x^i.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crumb {

constexpr uint32_t kCastagnoli = 0x82f63b78;

// `remainder` times x: a checksum's state, one bit of zero later.
constexpr uint32_t TimesX(uint32_t remainder) {
  return (remainder >> 1) ^ ((remainder & 1) != 0 ? kCastagnoli : 0);
}

// x^power, reduced.
constexpr uint32_t PowerOfX(size_t power) {
  uint32_t remainder = 0x80000000;
  for (size_t i = 0; i < power; ++i) {
    remainder = TimesX(remainder);
  }
  return remainder;
}

}  // namespace crumb
