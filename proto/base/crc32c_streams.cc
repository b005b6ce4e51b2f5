// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstring>

#include "proto/base/check.h"
#include "proto/base/crc32c_paths.h"
#include "proto/base/crc32c_polynomial.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace crumb {

#if defined(__x86_64__)

namespace {

uint64_t LoadWord(const std::byte* from) {
  uint64_t word = 0;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

// Bytes of each of the three streams between two merges: the merge costs about as much as
// 100 bytes, and three times this must stay inside the level-one cache. What is left of the long
// ones goes in short ones: an INT2 head block of head_dim 128 is one round of each.
constexpr size_t kLongStream = 1024;
constexpr size_t kShortStream = 512;

// Advancing a checksum over kBytes of zeros is linear in its bits; by table, a byte each.
template <size_t kBytes>
constexpr auto kZeros = [] {
  std::array<std::array<uint32_t, 256>, 4> tables{};
  uint32_t image = PowerOfX(8 * kBytes);  // Of bit 31, which has x^0.
  for (size_t bit = 32; bit-- > 0; image = TimesX(image)) {
    for (size_t byte = 0; byte < 256; ++byte) {
      tables[bit / 8][byte] ^= ((byte >> (bit % 8)) & 1) != 0 ? image : 0;
    }
  }
  return tables;
}();

template <size_t kBytes>
uint64_t Skip(uint64_t crc) {
  constexpr const auto& kTable = kZeros<kBytes>;
  return kTable[0][crc & 0xff] ^ kTable[1][(crc >> 8) & 0xff] ^ kTable[2][(crc >> 16) & 0xff] ^
         kTable[3][(crc >> 24) & 0xff];
}

// Rounds of three streams of kStream bytes each, as long as there are bytes for one.
template <size_t kStream>
__attribute__((target("sse4.2"))) uint64_t Rounds(const std::byte*& from,
                                                  size_t& size,
                                                  uint64_t crc) {
  constexpr size_t kLine = 64;
  for (; size >= 3 * kStream; from += 3 * kStream, size -= 3 * kStream) {
    uint64_t second = 0;
    uint64_t third = 0;
    for (size_t line = 0; line < kStream; line += kLine) {
      // The next round: three streams are more than the hardware follows. Beyond the end it fetches
      // nothing that is not there.
      for (size_t stream = 3; stream < 6; ++stream) {
        _mm_prefetch(reinterpret_cast<const char*>(from) + stream * kStream + line, _MM_HINT_T0);
      }
      for (size_t at = line; at < line + kLine; at += 8) {
        crc = _mm_crc32_u64(crc, LoadWord(from + at));
        second = _mm_crc32_u64(second, LoadWord(from + kStream + at));
        third = _mm_crc32_u64(third, LoadWord(from + 2 * kStream + at));
      }
    }
    crc = Skip<kStream>(Skip<kStream>(crc) ^ second) ^ third;
  }
  return crc;
}

}  // namespace

bool HasCrc32cStreams() {
  return __builtin_cpu_supports("sse4.2") != 0;
}

__attribute__((target("sse4.2"))) uint32_t Crc32cByStreams(std::span<const std::byte> bytes,
                                                           uint32_t seed) {
  const std::byte* from = bytes.data();
  size_t size = bytes.size();
  uint64_t crc = ~seed;
  crc = Rounds<kLongStream>(from, size, crc);
  crc = Rounds<kShortStream>(from, size, crc);
  for (; size >= 8; from += 8, size -= 8) {
    crc = _mm_crc32_u64(crc, LoadWord(from));
  }
  auto narrow = static_cast<uint32_t>(crc);
  for (; size > 0; ++from, --size) {
    narrow = _mm_crc32_u8(narrow, static_cast<unsigned char>(*from));
  }
  return ~narrow;
}

#else

bool HasCrc32cStreams() {
  return false;
}

uint32_t Crc32cByStreams(std::span<const std::byte> /*bytes*/, uint32_t /*seed*/) {
  CRUMB_CHECK(false, "HasCrc32cStreams() said that it is not here");
  return 0;
}

#endif

}  // namespace crumb
