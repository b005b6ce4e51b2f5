// SPDX-License-Identifier: Apache-2.0
//
// The launch of checksums. Plain C++ for callers that have no CUDA headers.
#pragma once

#include <cstdint>

#include "crumb/cuda/checksum_pages.h"

namespace crumb::gpu {

// CRC registers are polynomials over GF(2), bit 31 the constant; to append n zero bytes is to
// multiply by x^(8 n), which is linear. The images of the 32 single bits say all about it.
struct CrcAdvance {
  uint32_t of_bit[32] = {};
};

inline constexpr uint32_t kCrcUnitBytes = 512;  // What a warp reads in one step, 16 bytes a lane.
inline constexpr uint32_t kMaxCrcSegments = 16;

struct ChecksumPlan {
  // Segments of a range, one a warp: segment s is units [units * s / n, units * (s + 1) / n).
  uint32_t num_segments = 0;
  CrcAdvance unit;     // By kCrcUnitBytes.
  CrcAdvance lane[6];  // By 4 bytes, and by 16, 32, 64, 128, 256.
  // To the end of the range, of a segment's last byte: x^(8 n).
  uint32_t to_end[kMaxCrcSegments] = {};
  uint32_t start = 0;  // What the inversions at start and end of the checksum come to.
};

// Enqueues; parameters are valid. Returns a cudaError_t.
int LaunchChecksumPages(const ChecksumPagesParams& params,
                        const ChecksumPlan& plan,
                        uint32_t num_multiprocessors,
                        size_t shared_memory_per_block,
                        CUstream_st* stream);

}  // namespace crumb::gpu
