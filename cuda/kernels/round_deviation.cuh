// SPDX-License-Identifier: Apache-2.0
//
// Rows of BF16 to two bits by their mean and deviation (oscar-int2-lm, and values where a profile
// says so), the same bits as the CPU's: sums go in the order in which a lane has its channels,
// which is the order of the codec (cuda/reference/demote.cc says what the names mean).
//
// As where rows are rounded within a range, each row has three bf16 values from which on the code
// is 1, 2 and 3, found once a row.
#pragma once

#include <cstdint>

#include "cuda/kernels/round_nearest.cuh"

namespace crumb::gpu {

// The smallest bf16 that is not below `x`: bits.
__device__ __forceinline__ uint32_t CeilToBf16(float x) {
  const uint32_t bits = __float_as_uint(x);
  return (x < 0 ? bits : bits + 0xffffu) >> 16;
}
// The bf16 numbers in order as integers: +0 is 0, -0 is -1.
__device__ __forceinline__ int KeyOfBf16(uint32_t bits) {
  return (bits & 0x8000u) != 0 ? -1 - static_cast<int>(bits & 0x7fffu) : static_cast<int>(bits);
}
__device__ __forceinline__ uint32_t Bf16OfKey(int key) {
  return key >= 0 ? static_cast<uint32_t>(key) : 0x8000u | static_cast<uint32_t>(-key - 1);
}

// The largest bf16 that fp16 holds, where rows are cut, and as a pair.
inline constexpr float kMostBf16 = 65280.0f;
inline constexpr uint32_t kMostBf16Pair = 0x477f477fu;

// One row's mean, and how far from it the outer codes begin.
struct RowMiddle {
  float mean;
  float far_square;

  // Its first number of code 1, 2 or 3. They are where `guess` is, within a step of bf16 or two.
  template <typename Reaches>
  static __device__ __forceinline__ uint32_t SearchFirst(float guess, Reaches&& reaches) {
    int key = KeyOfBf16(CeilToBf16(guess));
    while (!reaches(FloatOfBf16(Bf16OfKey(key)))) {
      ++key;
    }
    while (reaches(FloatOfBf16(Bf16OfKey(key - 1)))) {
      --key;
    }
    return Bf16OfKey(key);
  }
  __device__ __forceinline__ bool IsFarBelow(float x) const {
    const float y = __fsub_rn(x, mean);
    return y < 0 && __fmul_rn(y, y) > far_square;
  }
  __device__ __forceinline__ bool IsFarAbove(float x) const {
    const float y = __fsub_rn(x, mean);
    return y >= 0 && __fmul_rn(y, y) > far_square;
  }
  // Numbers beyond kMostBf16 count as that, so where it is no further than others none is.
  __device__ __forceinline__ uint32_t First(int code) const {
    const float far = __fsqrt_rn(far_square);
    if (code == 1) {
      return !IsFarBelow(-kMostBf16)
                 ? 0xff80u
                 : SearchFirst(__fsub_rn(mean, far), [&](float x) { return !IsFarBelow(x); });
    }
    if (code == 2) {
      return CeilToBf16(mean);
    }
    return !IsFarAbove(kMostBf16)
               ? 0x7f80u
               : SearchFirst(__fadd_rn(mean, far), [&](float x) { return IsFarAbove(x); });
  }
};

// The sums over a lane's two rows of what `term` makes of their numbers.
template <int kDim, typename Term>
__device__ __forceinline__ float2 SumOfRows(const RowPairs<kDim>& rows, Term&& term) {
  float sums[2] = {0, 0};
#pragma unroll
  for (int n = 0; n < RowPairs<kDim>::kPairs; ++n) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const uint32_t word =
          AsWord(__hmin2(__hmax2(AsPair(rows.words[n][row]), AsPair(kMostBf16Pair | 0x80008000u)),
                         AsPair(kMostBf16Pair)));
      const float first = term(__uint_as_float(word << 16), row);
      const float second = term(__uint_as_float(word & 0xffff0000u), row);
      sums[row] = __fadd_rn(sums[row], __fadd_rn(first, second));
    }
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    sums[row] = __fadd_rn(sums[row], __shfl_xor_sync(kFullWarp, sums[row], 1));
    sums[row] = __fadd_rn(sums[row], __shfl_xor_sync(kFullWarp, sums[row], 2));
  }
  return {sums[0], sums[1]};
}

template <int kDim>
__device__ __forceinline__ NearestRows FindLevelsByDeviation(const RowPairs<kDim>& rows, int lane) {
  constexpr float kStepSquare = 0.99142f;
  constexpr float kMinScale = 1.0f / (1u << 24);
  constexpr float kChannels = kDim;
  uint32_t carries = 0;  // Of either half: bit 15, from exponents of all ones.
#pragma unroll
  for (int n = 0; n < RowPairs<kDim>::kPairs; ++n) {
    const uint32_t a = rows.words[n][0] & 0x7fff7fffu;
    const uint32_t b = rows.words[n][1] & 0x7fff7fffu;
    carries |=
        LowHalves(a + 0x00800080u, b + 0x00800080u) | HighHalves(a + 0x00800080u, b + 0x00800080u);
  }
  carries = ReduceQuad(carries, [](uint32_t a, uint32_t b) { return a | b; });

  float2 mean = SumOfRows(rows, [](float x, int) { return x; });
  mean = {mean.x / kChannels, mean.y / kChannels};  // Exact: a power of two.
  const auto from_mean = [&](float x, int row) { return __fsub_rn(x, row == 0 ? mean.x : mean.y); };
  const float2 squares = SumOfRows(rows, [&](float x, int row) {
    const float y = from_mean(x, row);
    return __fmul_rn(y, y);
  });
  const float2 far = {__fmul_rn(squares.x, kStepSquare / kChannels),
                      __fmul_rn(squares.y, kStepSquare / kChannels)};
  float code_sums[2] = {0, 0};  // Of codes less 3/2: exact.
  const float2 along = SumOfRows(rows, [&](float x, int row) {
    const float y = from_mean(x, row);
    const float weight = __fmul_rn(y, y) > (row == 0 ? far.x : far.y) ? 1.5f : 0.5f;
    code_sums[row] += y < 0 ? -weight : weight;
    return __fmul_rn(fabsf(y), weight);
  });
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    code_sums[row] += __shfl_xor_sync(kFullWarp, code_sums[row], 1);
    code_sums[row] += __shfl_xor_sync(kFullWarp, code_sums[row], 2);
  }

  // From here on each lane is for one row.
  const bool is_second = lane % 2 != 0;
  const RowMiddle middle = {is_second ? mean.y : mean.x, is_second ? far.y : far.x};
  const float square_sum = is_second ? squares.y : squares.x;
  const bool is_flat = square_sum < kChannels * (kMinScale * kMinScale);
  const float code_mean = (is_second ? code_sums[1] : code_sums[0]) / kChannels + 1.5f;  // Exact.
  NearestRows result;
  result.is_finite = (carries >> (is_second ? 31 : 15) & 1u) == 0;
  result.levels.scale =
      is_flat ? kMinScale : ToStoredScale(__fdiv_rn(square_sum, is_second ? along.y : along.x));
  result.levels.min = ToStoredMin(
      is_flat ? middle.mean : __fsub_rn(middle.mean, __fmul_rn(result.levels.scale, code_mean)));
  uint32_t found = 0x7f807f80u;  // Never: all codes are 0.
  if (!is_flat && result.is_finite) {
    found = middle.First(NearestRows::LowCode(lane)) | middle.First(3) << 16;
  }
  result.TakeBounds(found);
  return result;
}

}  // namespace crumb::gpu
