// SPDX-License-Identifier: Apache-2.0
#include "proto/base/streaming_copy.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "proto/base/check.h"
#include "proto/base/crc32c.h"
#include "proto/base/crc32c_paths.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace crumb {
namespace {

constexpr size_t kLine = 64;

#if defined(__x86_64__)

constexpr size_t kAhead = 4096;

// Whole lines; `to` is 16-byte aligned. SSE2 suffices: four stores fill one line's write buffer.
void StreamLines(const std::byte* from, std::byte* to, size_t num_lines) {
  for (size_t line = 0; line < num_lines; ++line, from += kLine, to += kLine) {
    // Beyond the end it fetches nothing that is not there: a prefetch never faults.
    _mm_prefetch(reinterpret_cast<const char*>(from) + kAhead, _MM_HINT_T0);
    const auto* in = reinterpret_cast<const __m128i*>(from);
    auto* out = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(in);
    const __m128i b = _mm_loadu_si128(in + 1);
    const __m128i c = _mm_loadu_si128(in + 2);
    const __m128i d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
}

// Leaves the stores on their way: Settle comes before anyone else may look.
void Stream(std::span<const std::byte> source, std::span<std::byte> target) {
  size_t done = 0;
  if (reinterpret_cast<uintptr_t>(target.data()) % 16 == 0) {
    done = source.size() / kLine * kLine;
    StreamLines(source.data(), target.data(), done / kLine);
  }
  if (done < source.size()) {
    std::memcpy(target.data() + done, source.data() + done, source.size() - done);
  }
}

void Settle() {
  _mm_sfence();
}

#else

void Stream(std::span<const std::byte> source, std::span<std::byte> target) {
  if (!source.empty()) {
    std::memcpy(target.data(), source.data(), source.size());
  }
}

void Settle() {}

#endif

}  // namespace

void StreamingCopy(std::span<const std::byte> source, std::span<std::byte> target) {
  CRUMB_CHECK(source.size() == target.size(), "the two sides of a copy differ in length");
  Stream(source, target);
  Settle();
}

uint32_t StreamingCopyWithCrc32c(std::span<const std::byte> source,
                                 std::span<std::byte> target,
                                 uint32_t seed) {
  CRUMB_CHECK(source.size() == target.size(), "the two sides of a copy differ in length");
  uint32_t crc = seed;
  if (HasCrc32cFolding() && reinterpret_cast<uintptr_t>(target.data()) % kLine == 0) {
    crc = StreamByFolding(source, target, seed);
  } else {
    // By way of memory that stays in the level-one cache, so that the source is read once.
    alignas(kLine) std::array<std::byte, size_t{4} << 10> buffer{};
    for (size_t at = 0; at < source.size(); at += buffer.size()) {
      const auto piece = std::span(buffer).first(std::min(buffer.size(), source.size() - at));
      crc = CopyWithCrc32c(source.subspan(at, piece.size()), piece, crc);
      Stream(piece, target.subspan(at, piece.size()));
    }
  }
  Settle();
  return crc;
}

}  // namespace crumb
