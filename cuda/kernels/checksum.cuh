// SPDX-License-Identifier: Apache-2.0
//
// CRC-32C of many ranges. A warp takes a segment of a range, 512 bytes a step. Each lane has four
// registers, one for each word of its 16 bytes; a step advances them over 512 zero bytes and adds
// the next words. At the end the registers of a warp are advanced to one place and added up, and
// segments of a range meet by atomic addition (which is exclusive or, so order does not matter).
//
// To advance is four lookups, one a byte. Each lane has its own copy of the tables, in its own bank
// of shared memory, 128 KiB in all: a lookup never waits for another lane's. That is 32 bytes a
// cycle and multiprocessor, 7 TB/s on an H200, above what memory brings. Devices with less shared
// memory share a copy among a few lanes.
#pragma once

#include <cstdint>

#include "cuda/kernels/ptx.cuh"
#include "cuda/launch/checksum_pages.h"

namespace crumb::gpu {

inline constexpr int kChecksumThreads = 1024;
inline constexpr uint32_t kCrcPolynomial = 0x82f63b78u;  // Castagnoli, reflected.

template <int kCopies>
struct ChecksumShared {
  uint32_t unit[4][256][kCopies];  // [byte, value, lane % kCopies]
  uint32_t lane[6][4][256];
};

// The image of `value` at byte `byte` of a register.
__device__ __forceinline__ uint32_t ImageOfByte(const CrcAdvance& advance,
                                                int byte,
                                                uint32_t value) {
  uint32_t image = 0;
#pragma unroll
  for (int bit = 0; bit < 8; ++bit) {
    image ^= (value >> bit & 1) != 0 ? advance.of_bit[8 * byte + bit] : 0;
  }
  return image;
}

template <int kCopies>
__device__ __forceinline__ void FillTables(ChecksumShared<kCopies>& shared,
                                           const ChecksumPlan& plan) {
  const int thread = static_cast<int>(threadIdx.x);
  const int byte = thread / 256;
  const auto value = static_cast<uint32_t>(thread % 256);
  const uint32_t image = ImageOfByte(plan.unit, byte, value);
  // Neighbouring threads start at other lanes, so that their stores meet other banks.
#pragma unroll 8
  for (int i = 0; i < kCopies; ++i) {
    shared.unit[byte][value][(i + thread) % kCopies] = image;
  }
  for (int table = 0; table < 6; ++table) {
    shared.lane[table][byte][value] = ImageOfByte(plan.lane[table], byte, value);
  }
}

// Over 512 zero bytes; `table` is the lane's own copy.
template <int kCopies>
__device__ __forceinline__ uint32_t AdvanceUnit(const uint32_t* table, uint32_t crc) {
  const auto look = [&](uint32_t byte) {
    return table[(byte * 256 + (crc >> (8 * byte) & 255)) * kCopies];
  };
  return look(0) ^ look(1) ^ look(2) ^ look(3);
}

__device__ __forceinline__ uint32_t AdvanceLane(const uint32_t (&table)[4][256], uint32_t crc) {
  return table[0][crc & 255] ^ table[1][crc >> 8 & 255] ^ table[2][crc >> 16 & 255] ^
         table[3][crc >> 24];
}

// The product of two polynomials.
__device__ __forceinline__ uint32_t MultiplyCrc(uint32_t a, uint32_t b) {
  uint32_t product = 0;
#pragma unroll 8
  for (int bit = 31; bit >= 0; --bit) {
    product ^= (a >> bit & 1) != 0 ? b : 0;
    b = (b >> 1) ^ ((b & 1) != 0 ? kCrcPolynomial : 0);
  }
  return product;
}

// The register after `count` units from `first` on, one warp.
template <int kCopies>
__device__ __forceinline__ uint32_t ChecksumSegment(const uint4* first,
                                                    uint32_t count,
                                                    const ChecksumShared<kCopies>& shared,
                                                    int lane) {
  constexpr uint32_t kAtOnce = 4;
  const uint32_t* table = &shared.unit[0][0][lane % kCopies];
  const uint4* from = first + lane;
  uint32_t crc[4] = {};
  const auto add = [&](const uint4& words) {
    crc[0] = AdvanceUnit<kCopies>(table, crc[0]) ^ words.x;
    crc[1] = AdvanceUnit<kCopies>(table, crc[1]) ^ words.y;
    crc[2] = AdvanceUnit<kCopies>(table, crc[2]) ^ words.z;
    crc[3] = AdvanceUnit<kCopies>(table, crc[3]) ^ words.w;
  };
  uint4 next[kAtOnce];
  uint32_t unit = 0;
  if (count >= kAtOnce) {
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      next[i] = __ldcs(from + i * 32);
    }
    for (unit = kAtOnce; unit + kAtOnce <= count; unit += kAtOnce) {
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint4 words = next[i];
        next[i] = __ldcs(from + (unit + i) * 32);
        add(words);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      add(next[i]);
    }
  }
  for (; unit < count; ++unit) {
    add(__ldcs(from + unit * 32));
  }
  uint32_t sum = AdvanceLane(shared.lane[0], crc[0]) ^ crc[1];
  sum = AdvanceLane(shared.lane[0], sum) ^ crc[2];
  sum = AdvanceLane(shared.lane[0], sum) ^ crc[3];
#pragma unroll
  for (int i = 0; i < 5; ++i) {  // Lane 0 ends with all.
    sum = AdvanceLane(shared.lane[1 + i], sum) ^ __shfl_down_sync(kFullWarp, sum, 1 << i);
  }
  return AdvanceLane(shared.lane[0], sum);
}

template <int kCopies>
__global__ __launch_bounds__(kChecksumThreads, 1) void ChecksumKernel(
    const __grid_constant__ ChecksumPagesParams params, const __grid_constant__ ChecksumPlan plan) {
  extern __shared__ __align__(16) std::byte memory[];
  auto& shared = *reinterpret_cast<ChecksumShared<kCopies>*>(memory);
  FillTables(shared, plan);
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t num_warps = gridDim.x * (kChecksumThreads / 32);
  const uint32_t warp = threadIdx.x / 32 * gridDim.x + blockIdx.x;  // Even over multiprocessors.
  const uint64_t num_items = uint64_t{params.num_pages} * params.num_ranges * plan.num_segments;
  const uint64_t units = params.range_bytes / kCrcUnitBytes;
  for (uint64_t item = warp; item < num_items; item += num_warps) {
    const auto segment = static_cast<uint32_t>(item % plan.num_segments);
    const uint64_t range = item / plan.num_segments;
    const std::byte* image = params.pages[range / params.num_ranges];
    if (image == nullptr) {
      continue;
    }
    const std::byte* bytes =
        image + params.offset + range % params.num_ranges * params.range_stride;
    const uint64_t begin = units * segment / plan.num_segments;
    const uint64_t end = units * (segment + 1) / plan.num_segments;
    const uint32_t crc =
        ChecksumSegment(reinterpret_cast<const uint4*>(bytes + begin * kCrcUnitBytes),
                        static_cast<uint32_t>(end - begin), shared, lane);
    if (lane == 0) {
      const uint32_t start = segment == 0 ? plan.start : 0;
      atomicXor(&params.checksums[range], MultiplyCrc(crc, plan.to_end[segment]) ^ start);
    }
  }
}

}  // namespace crumb::gpu
