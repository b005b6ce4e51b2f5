// SPDX-License-Identifier: Apache-2.0
#include "proto/base/crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "proto/base/check.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace crumb {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // Reflected.

// Slicing by eight: table k advances a byte that is k bytes away from the end of a word.
constexpr auto kTables = [] {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    }
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      tables[k][byte] = (tables[k - 1][byte] >> 8) ^ tables[0][tables[k - 1][byte] & 0xff];
    }
  }
  return tables;
}();

uint64_t LoadWord(const std::byte* from) {
  uint64_t word = 0;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

uint32_t StepByte(uint32_t crc, std::byte byte) {
  return (crc >> 8) ^ kTables[0][(crc ^ static_cast<uint32_t>(byte)) & 0xff];
}

#if defined(__x86_64__)

// Bytes of each of the three streams between two merges: the merge costs about as much as
// 100 bytes, and three times this must stay inside the level-one cache. What is left of the long
// ones goes in short ones: an INT2 head block of head_dim 128 is one round of each.
constexpr size_t kLongStream = 1024;
constexpr size_t kShortStream = 512;

// Advancing a checksum over kBytes of zeros is linear in its bits; by table, a byte each.
template <size_t kBytes>
constexpr auto kZeros = [] {
  std::array<std::array<uint32_t, 256>, 4> tables{};
  std::array<uint32_t, 32> image{};  // Of each single bit.
  for (size_t bit = 0; bit < 32; ++bit) {
    uint32_t crc = uint32_t{1} << bit;
    for (size_t step = 0; step < kBytes; ++step) {
      crc = (crc >> 8) ^ kTables[0][crc & 0xff];
    }
    image[bit] = crc;
  }
  for (size_t k = 0; k < 4; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      for (size_t bit = 0; bit < 8; ++bit) {
        tables[k][byte] ^= ((byte >> bit) & 1) != 0 ? image[8 * k + bit] : 0;
      }
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

__attribute__((target("sse4.2"))) uint32_t Hardware(const std::byte* from,
                                                    size_t size,
                                                    uint32_t seed) {
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

#endif

}  // namespace

uint32_t Crc32cPortable(std::span<const std::byte> bytes, uint32_t seed) {
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
    crc = StepByte(crc, *from);
  }
  return ~crc;
}

uint32_t Crc32c(std::span<const std::byte> bytes, uint32_t seed) {
#if defined(__x86_64__)
  static const bool kHasInstruction = __builtin_cpu_supports("sse4.2") != 0;
  if (kHasInstruction) {
    return Hardware(bytes.data(), bytes.size(), seed);
  }
#endif
  return Crc32cPortable(bytes, seed);
}

uint32_t CopyWithCrc32c(std::span<const std::byte> source, std::span<std::byte> target) {
  CRUMB_CHECK(source.size() == target.size(), "the two sides of a copy differ in length");
  // By pieces that stay in the level-one cache between the checksum and the copy.
  constexpr size_t kPieceBytes = size_t{12} << 10;
  uint32_t crc = 0;
  for (size_t at = 0; at < source.size(); at += kPieceBytes) {
    const auto piece = source.subspan(at, std::min(kPieceBytes, source.size() - at));
    std::memcpy(target.data() + at, piece.data(), piece.size());
    // Of what was written, not of what was read: the source may be another process's to change.
    crc = Crc32c(target.subspan(at, piece.size()), crc);
  }
  return crc;
}

}  // namespace crumb
