// SPDX-License-Identifier: Apache-2.0
//
// Slicing by eight, M. Kounavis and F. Berry, "Novel Table Lookup-Based Algorithms for
// High-Performance CRC Generation", 2008.
#include <array>
#include <cstring>

#include "proto/base/crc32c_paths.h"
#include "proto/base/crc32c_polynomial.h"

namespace crumb {
namespace {

// Table k advances a byte that is k bytes away from the end of a word.
constexpr auto kTables = [] {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t state = byte;
    for (size_t k = 0; k < 8; ++k) {
      for (int bit = 0; bit < 8; ++bit) {
        state = TimesX(state);
      }
      tables[k][byte] = state;
    }
  }
  return tables;
}();

uint64_t LoadWord(const std::byte* from) {
  uint64_t word = 0;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

}  // namespace

uint32_t Crc32cByTable(std::span<const std::byte> bytes, uint32_t seed) {
  uint32_t crc = ~seed;
  const std::byte* from = bytes.data();
  size_t size = bytes.size();
  for (; size >= 8; from += 8, size -= 8) {
    const uint64_t word = LoadWord(from) ^ crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) {
      crc ^= kTables[7 - k][(word >> (8 * k)) & 0xff];
    }
  }
  for (; size > 0; ++from, --size) {
    crc = (crc >> 8) ^ kTables[0][(crc ^ static_cast<uint32_t>(*from)) & 0xff];
  }
  return ~crc;
}

}  // namespace crumb
