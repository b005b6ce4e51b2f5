// SPDX-License-Identifier: Apache-2.0
//
// CRC-32C (Castagnoli, RFC 3720 appendix B.4): the checksum of page bytes, by the fastest way that
// the processor has (crc32c_paths.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace crumb {

// The checksum of `bytes`. `seed` is the checksum of what came before them, so that
// Crc32c(b, Crc32c(a)) is the checksum of a followed by b. Thread-safe.
uint32_t Crc32c(std::span<const std::byte> bytes, uint32_t seed = 0);

// Joins the checksums of two parts that were computed apart: Crc32cJoin(b.size())(Crc32c(a),
// Crc32c(b)) is the checksum of a followed by b. Making one costs about a microsecond, a call some
// tens of nanoseconds. An immutable value; Thread-safe.
class Crc32cJoin {
 public:
  explicit Crc32cJoin(size_t second_bytes);
  uint32_t operator()(uint32_t first, uint32_t second) const;

 private:
  uint32_t zeros_;  // What appending second_bytes zeros multiplies by.
};

// Copies `source` to `target` in one pass over memory, and returns the checksum of what it wrote:
// the source may be another process's to change meanwhile. Equal lengths; the two must not overlap.
// The target is then in the cache; for one that is not read soon, StreamingCopyWithCrc32c.
uint32_t CopyWithCrc32c(std::span<const std::byte> source,
                        std::span<std::byte> target,
                        uint32_t seed = 0);

}  // namespace crumb
