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

// The product of two, reduced.
constexpr uint32_t Times(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (; b != 0; b <<= 1, a = TimesX(a)) {  // b by ascending powers of x.
    product ^= a & (0u - (b >> 31));
  }
  return product;
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
