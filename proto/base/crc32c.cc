// SPDX-License-Identifier: Apache-2.0
#include "proto/base/crc32c.h"

#include <algorithm>
#include <cstring>

#include "proto/base/check.h"
#include "proto/base/crc32c_paths.h"
#include "proto/base/crc32c_polynomial.h"

namespace crumb {
namespace {

using Path = uint32_t (*)(std::span<const std::byte>, uint32_t);

Path FastestPath() {
  if (HasCrc32cFolding()) {
    return Crc32cByFolding;
  }
  return HasCrc32cStreams() ? Crc32cByStreams : Crc32cByTable;
}

}  // namespace

uint32_t Crc32c(std::span<const std::byte> bytes, uint32_t seed) {
  static const Path kPath = FastestPath();
  return kPath(bytes, seed);
}

Crc32cJoin::Crc32cJoin(size_t second_bytes) : zeros_(PowerOfX(0)) {
  uint32_t power = PowerOfX(8);
  for (size_t rest = second_bytes; rest > 0; rest >>= 1) {
    if ((rest & 1) != 0) {
      zeros_ = Times(zeros_, power);
    }
    power = Times(power, power);
  }
}

uint32_t Crc32cJoin::operator()(uint32_t first, uint32_t second) const {
  // The inversions before and after either checksum cancel out.
  return Times(first, zeros_) ^ second;
}

uint32_t CopyWithCrc32c(std::span<const std::byte> source,
                        std::span<std::byte> target,
                        uint32_t seed) {
  CRUMB_CHECK(source.size() == target.size(), "the two sides of a copy differ in length");
  if (HasCrc32cFolding()) {
    return CopyByFolding(source, target, seed);
  }
  // By pieces that stay in the level-one cache between the checksum and the copy.
  constexpr size_t kPieceBytes = size_t{12} << 10;
  uint32_t crc = seed;
  for (size_t at = 0; at < source.size(); at += kPieceBytes) {
    const auto piece = source.subspan(at, std::min(kPieceBytes, source.size() - at));
    std::memcpy(target.data() + at, piece.data(), piece.size());
    crc = Crc32c(target.subspan(at, piece.size()), crc);
  }
  return crc;
}

}  // namespace crumb
