// SPDX-License-Identifier: Apache-2.0
#include "cuda/gpu/checksum_plan.h"

#include <algorithm>

namespace crumb::gpu {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78u;  // Castagnoli, reflected.
constexpr uint32_t kOne = 0x80000000u;         // The constant polynomial.

uint32_t Multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (int bit = 31; bit >= 0; --bit) {
    product ^= (a >> bit & 1) != 0 ? b : 0;
    b = (b >> 1) ^ ((b & 1) != 0 ? kPolynomial : 0);
  }
  return product;
}

// x^(8 n): what appending n zero bytes multiplies a register by.
uint32_t PowerOfBytes(uint64_t num_bytes) {
  uint32_t power = kOne;
  uint32_t square = kOne >> 8;  // x^8.
  for (; num_bytes > 0; num_bytes >>= 1) {
    if ((num_bytes & 1) != 0) {
      power = Multiply(power, square);
    }
    square = Multiply(square, square);
  }
  return power;
}

CrcAdvance AdvanceBy(uint64_t num_bytes) {
  const uint32_t power = PowerOfBytes(num_bytes);
  CrcAdvance advance{};
  for (uint32_t bit = 0; bit < 32; ++bit) {
    advance.of_bit[bit] = Multiply(uint32_t{1} << bit, power);
  }
  return advance;
}

}  // namespace

ChecksumPlan PlanChecksum(const ChecksumPagesParams& params, uint32_t num_warps) {
  const uint64_t units = params.range_bytes / kCrcUnitBytes;
  const uint64_t ranges = uint64_t{params.num_pages} * params.num_ranges;
  // As many segments as give each warp one; below 16 units a segment's end would show.
  const uint64_t wanted = std::max<uint64_t>(1, num_warps / ranges);
  ChecksumPlan plan{};
  plan.num_segments = static_cast<uint32_t>(
      std::min<uint64_t>({wanted, std::max<uint64_t>(1, units / 16), uint64_t{kMaxCrcSegments}}));
  plan.unit = AdvanceBy(kCrcUnitBytes);
  plan.lane[0] = AdvanceBy(4);
  for (uint32_t i = 0; i < 5; ++i) {
    plan.lane[1 + i] = AdvanceBy(uint64_t{16} << i);
  }
  for (uint32_t segment = 0; segment < plan.num_segments; ++segment) {
    const uint64_t end = units * (segment + 1) / plan.num_segments;
    plan.to_end[segment] = PowerOfBytes((units - end) * kCrcUnitBytes);
  }
  plan.start = ~Multiply(0xffffffffu, PowerOfBytes(params.range_bytes));
  return plan;
}

}  // namespace crumb::gpu
