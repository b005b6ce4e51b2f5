// SPDX-License-Identifier: Apache-2.0
//
// What a warp that rounds rows with feedback keeps in shared memory: of eight rows in four ranges.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crumb::gpu {

template <int kDim>
struct AwareScratch {
  static constexpr int kProblems = 32;  // (row, range): row r in range p is r + 8 p.
  static constexpr uint32_t kErrorStride = 2 * kDim + 16;
  static constexpr int kSumStride = 20;  // Floats: 16-byte reads of eight rows meet no bank twice.
  static constexpr int kWordStride = kDim / 16 + 1;
  // [problem, channel] bf16: errors over the feedback's diagonal element.
  alignas(16) std::byte errors[kProblems * kErrorStride];
  alignas(16) float sums[kProblems * kSumStride];  // [problem, 16]: a product with them.
  uint32_t codes[kProblems * kWordStride];         // Row words.
};

// A product's accumulators, [32 problems, 16], to scratch.sums.
template <int kDim>
__device__ __forceinline__ void StoreSums(AwareScratch<kDim>& scratch,
                                          const float (&sums)[2][2][4],
                                          int lane) {
  constexpr int kStride = AwareScratch<kDim>::kSumStride;
  float* to = scratch.sums + lane / 4 * kStride + 2 * (lane % 4);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<float2*>(to + (16 * m + 8 * half) * kStride + 8 * n) =
            make_float2(sums[m][n][2 * half], sums[m][n][2 * half + 1]);
      }
    }
  }
}

}  // namespace crumb::gpu
