// SPDX-License-Identifier: Apache-2.0
//
// The four levels of a row of BF16, and where in it each code begins: as the CPU's arithmetic has
// them, bit for bit.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/kernels/ptx.cuh"

namespace crumb::gpu {

__device__ __forceinline__ float FloatOfBf16(uint32_t bits) {
  return __uint_as_float(bits << 16);
}

inline constexpr float kMaxHalf = 65504.0f;

struct RowLevels {
  float scale;
  float min;
};

// Scale and minimum as they are stored.
__device__ __forceinline__ float ToStoredScale(float x) {
  constexpr float kMinScale = 1.0f / (1u << 24);
  return fmaxf(__half2float(__float2half_rn(fminf(x, kMaxHalf))), kMinScale);
}
__device__ __forceinline__ float ToStoredMin(float x) {
  x = fminf(fmaxf(__fadd_rn(x, 0.0f), -kMaxHalf), kMaxHalf);  // A -0 becomes 0.
  return __half2float(__float2half_rn(x));
}

// x / 3 in rounded arithmetic, for x of 2^-100 and more; what is less, and infinity, come out as
// what ToStoredScale takes alike.
__device__ __forceinline__ float ThirdOf(float x) {
  constexpr float kThird = 1.0f / 3.0f;
  const float about = __fmul_rn(x, kThird);
  return __fmaf_rn(__fmaf_rn(about, -3.0f, x), kThird, about);
}

// As the twin's Levels (cuda/reference/demote.cc).
__device__ __forceinline__ RowLevels MakeLevels(float low, float high, float tau) {
  low = fminf(fmaxf(low, -tau), tau);
  high = fminf(fmaxf(high, -tau), tau);
  RowLevels levels;
  levels.min = ToStoredMin(low);
  levels.scale = ToStoredScale(ThirdOf(__fsub_rn(high, levels.min)));
  return levels;
}

// The bf16 magnitude `bits` as a clip threshold.
__device__ __forceinline__ float ClipThreshold(uint32_t bits) {
  return __half2float(__float2half_rn(fminf(FloatOfBf16(bits), kMaxHalf)));
}

// Whether the float below scale / 2, divided by `scale`, plus 1/2, rounds to 1. The quotient must
// round to the float below 1/2, which is more than 1/2 - 1.5 steps: so where a step of scale / 2 is
// less than that part of the scale, for significands above 4/3, or is halved, for 1.
__device__ __forceinline__ bool BelowHalfRoundsUp(float scale) {
  const uint32_t fraction = __float_as_uint(scale) & 0x7fffffu;
  return fraction == 0 || 3 * fraction > 0x800000u;
}

// Numbers that have a code or a higher one: those x for which clamp(x) - min, rounded, is at least
// `bound`.
struct CodeRange {
  float bound;
  float min;
  float tau;

  // As floor((clamp(x) - min) / scale + 0.5) >= code is, in rounded arithmetic: where x - min is at
  // least (code - 1/2) * scale, but for code 1, where the number below 1/2 may round up too.
  static __device__ __forceinline__ CodeRange Of(const RowLevels& levels, float clip, int code) {
    const float middle = static_cast<float>(code) - 0.5f;
    CodeRange range = {__fmul_rn(middle, levels.scale), levels.min,
                       clip};  // Exact: 11 bits by two.
    if (code == 1 && BelowHalfRoundsUp(levels.scale)) {
      range.bound = __uint_as_float(__float_as_uint(range.bound) - 1);
    }
    return range;
  }

  __device__ __forceinline__ bool Reaches(float x) const {
    return __fsub_rn(fminf(fmaxf(x, -tau), tau), min) >= bound;
  }

  // The smallest bf16 of it, by bisection: bits; infinity if there is none.
  __device__ __forceinline__ uint32_t SearchFirst() const {
    // The bf16 numbers in order as integers: +0 is 0, -0 is -1.
    const auto bits_of = [](int key) {
      return key >= 0 ? static_cast<uint32_t>(key) : 0x8000u | static_cast<uint32_t>(-key - 1);
    };
    int low = -0x7f81;  // Minus infinity, which is not of it.
    int high = 0x7f80;
    while (high - low > 1) {
      const int key = (low + high) >> 1;
      if (Reaches(FloatOfBf16(bits_of(key)))) {
        high = key;
      } else {
        low = key;
      }
    }
    return bits_of(high);
  }

  // The same, nearly always by one guess: bound + min rounded up to bf16, if that is of it and the
  // one before is not.
  __device__ __forceinline__ uint32_t First() const {
    float about = __fadd_rn(bound, min);
    if (about == 0) {  // As where a row is cut on both sides: where x - min first rounds up to
                       // `bound`, half a step below zero.
      about = __uint_as_float(((__float_as_uint(bound) & 0x7f800000u) - (24u << 23)) | 0x80000000u);
    }
    const bool is_negative = about < 0;
    const uint32_t bits = __float_as_uint(about);
    const uint32_t guess = (is_negative ? bits : bits + 0xffffu) & 0xffff0000u;
    const uint32_t before = guess + (is_negative ? 0x10000u : 0u - 0x10000u);
    const bool is_first = Reaches(__uint_as_float(guess)) & !Reaches(__uint_as_float(before));
    return is_first ? guess >> 16 : SearchFirst();
  }
};

}  // namespace crumb::gpu
