// SPDX-License-Identifier: Apache-2.0
//
// Folding, after V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
// Instruction", Intel 2009: a checksum is the remainder of the bytes, read as a polynomial, so
// bytes may be replaced by any that have the same remainder. 128 bits are moved D bits ahead in the
// stream by multiplying each half with a power of x that has been reduced to 32 bits.
//
// Bits are reflected, as in CRC-32C: bit 0 has the highest power. A product of two reflected 64-bit
// words lacks one power of x, and a constant of 32 bits in the low half of a word has x^32 too
// many; the exponents below account for both.
#include <array>
#include <cstring>

#include "proto/base/check.h"
#include "proto/base/crc32c_paths.h"
#include "proto/base/crc32c_polynomial.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace crumb {

#if defined(__x86_64__)

namespace {

#define CRUMB_FOLDING __attribute__((target("avx512f,avx512vl,vpclmulqdq,pclmul,sse4.2")))

constexpr size_t kVectorBytes = 64;
constexpr size_t kVectors = 4;  // Enough to hide the latency of a product.
constexpr size_t kRoundBytes = kVectors * kVectorBytes;
constexpr size_t kPrefetchBytes = 4096;

// What moves 128 bits by kBytes: a factor for the half that comes first in the stream, and one for
// the other, which is 64 bits further on.
template <size_t kBytes>
struct Factors {
  static constexpr int64_t kFirst = PowerOfX(8 * kBytes + 31);
  static constexpr int64_t kSecond = PowerOfX(8 * kBytes - 33);
};

template <size_t kBytes>
CRUMB_FOLDING inline __m512i FactorsOfAllLanes() {
  using F = Factors<kBytes>;
  return _mm512_set4_epi64(F::kSecond, F::kFirst, F::kSecond, F::kFirst);
}

// What becomes of the bytes beside the checksum.
enum class Copy { kNone, kToCache, kPastCaches };

// The vector at `from`; the same register goes to `to`, so that what is summed is what is written.
template <Copy kCopy>
CRUMB_FOLDING inline __m512i Take(const std::byte* from, [[maybe_unused]] std::byte* to) {
  const __m512i vector = _mm512_loadu_si512(from);
  if constexpr (kCopy == Copy::kToCache) {
    _mm512_storeu_si512(to, vector);
  } else if constexpr (kCopy == Copy::kPastCaches) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), vector);
  }
  return vector;
}

// `vector` moved to where `next` is, and added to it.
CRUMB_FOLDING inline __m512i Fold(__m512i vector, __m512i factors, __m512i next) {
  constexpr int kXorOfThree = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(vector, factors, 0x00),
                                   _mm512_clmulepi64_epi128(vector, factors, 0x11), next,
                                   kXorOfThree);
}

// Replaces the whole vectors of `bytes`, of which there is at least a round, by one of the same
// remainder, after a state of `state` before them. Takes them off, and copies them to `to`.
template <Copy kCopy>
CRUMB_FOLDING void FoldVectors(std::span<const std::byte>& bytes,
                               std::byte* to,
                               uint32_t state,
                               std::span<std::byte, kVectorBytes> folded) {
  const std::byte* const begin = bytes.data();
  const std::byte* from = begin;
  size_t size = bytes.size();
  const auto place = [begin, to](const std::byte* vector) {
    return kCopy == Copy::kNone ? nullptr : to + (vector - begin);
  };
  __m512i vectors[kVectors];
  for (size_t i = 0; i < kVectors; ++i) {
    const std::byte* const first = from + i * kVectorBytes;
    vectors[i] = Take<kCopy>(first, place(first));
  }
  vectors[0] = _mm512_xor_si512(vectors[0],
                                _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
  from += kRoundBytes;
  size -= kRoundBytes;
  const __m512i by_round = FactorsOfAllLanes<kRoundBytes>();
  for (; size >= kRoundBytes; from += kRoundBytes, size -= kRoundBytes) {
    for (size_t i = 0; i < kVectors; ++i) {
      const std::byte* const next = from + i * kVectorBytes;
      // The hardware stops at the end of a page. Beyond the end it fetches nothing that is not
      // there.
      _mm_prefetch(reinterpret_cast<const char*>(next) + kPrefetchBytes, _MM_HINT_T0);
      vectors[i] = Fold(vectors[i], by_round, Take<kCopy>(next, place(next)));
    }
  }
  const __m512i by_vector = FactorsOfAllLanes<kVectorBytes>();
  __m512i sum = vectors[0];
  for (size_t i = 1; i < kVectors; ++i) {
    sum = Fold(sum, by_vector, vectors[i]);
  }
  for (; size >= kVectorBytes; from += kVectorBytes, size -= kVectorBytes) {
    sum = Fold(sum, by_vector, Take<kCopy>(from, place(from)));
  }
  bytes = bytes.last(size);
  _mm512_storeu_si512(folded.data(), sum);
}

template <Copy kCopy>
uint32_t CopyAndSum(std::span<const std::byte> source, std::span<std::byte> target, uint32_t seed) {
  constexpr uint32_t kSeedOfZeroState = ~0u;
  std::span<const std::byte> rest = source;
  uint32_t crc = seed;
  if (source.size() >= kRoundBytes) {
    std::array<std::byte, kVectorBytes> folded{};
    FoldVectors<kCopy>(rest, target.data(), ~seed, folded);
    crc = Crc32cByStreams(folded, kSeedOfZeroState);
  }
  if (kCopy != Copy::kNone && !rest.empty()) {
    const std::span<std::byte> end = target.last(rest.size());
    std::memcpy(end.data(), rest.data(), rest.size());
    rest = end;
  }
  return Crc32cByStreams(rest, crc);
}

}  // namespace

bool HasCrc32cFolding() {
  // Also asks whether the operating system saves the wide registers.
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512vl") != 0 &&
         __builtin_cpu_supports("vpclmulqdq") != 0 && __builtin_cpu_supports("pclmul") != 0 &&
         HasCrc32cStreams();
}

uint32_t Crc32cByFolding(std::span<const std::byte> bytes, uint32_t seed) {
  return CopyAndSum<Copy::kNone>(bytes, {}, seed);
}

uint32_t CopyByFolding(std::span<const std::byte> source,
                       std::span<std::byte> target,
                       uint32_t seed) {
  return CopyAndSum<Copy::kToCache>(source, target, seed);
}

uint32_t StreamByFolding(std::span<const std::byte> source,
                         std::span<std::byte> target,
                         uint32_t seed) {
  return CopyAndSum<Copy::kPastCaches>(source, target, seed);
}

#else

bool HasCrc32cFolding() {
  return false;
}

uint32_t Crc32cByFolding(std::span<const std::byte> /*bytes*/, uint32_t /*seed*/) {
  CRUMB_CHECK(false, "HasCrc32cFolding() said that it is not here");
  return 0;
}

uint32_t CopyByFolding(std::span<const std::byte> /*source*/,
                       std::span<std::byte> /*target*/,
                       uint32_t /*seed*/) {
  CRUMB_CHECK(false, "HasCrc32cFolding() said that it is not here");
  return 0;
}

uint32_t StreamByFolding(std::span<const std::byte> /*source*/,
                         std::span<std::byte> /*target*/,
                         uint32_t /*seed*/) {
  CRUMB_CHECK(false, "HasCrc32cFolding() said that it is not here");
  return 0;
}

#endif

}  // namespace crumb
