// SPDX-License-Identifier: Apache-2.0
//
// The vector type of the codec's kernels in plain C++, for the compiler to vectorise as it can; see
// simd_avx512.h.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "proto/base/bfloat16.h"
#include "proto/base/float16.h"

namespace crumb::cpu {
namespace {

struct Simd {
  static constexpr size_t kLanes = 8;
  static constexpr size_t kRegisters = 16;
  static constexpr bool kHasShorts = false;
  struct Float {
    float lanes[kLanes];
  };
  struct Int {
    uint32_t lanes[kLanes];
  };
  struct Mask {
    bool lanes[kLanes];
  };

  // ---- Floats.
  static Float Zero() { return Set(0); }
  static Float Set(float x) {
    return Make([=](size_t) { return x; });
  }
  static Float Load(const float* from) {
    return Make([=](size_t i) { return from[i]; });
  }
  static Float LoadBf16(const BFloat16* from) {
    return Make([=](size_t i) { return from[i].ToFloat(); });
  }
  static Float LoadBytes(const uint8_t* from) {
    return Make([=](size_t i) { return static_cast<float>(from[i]); });
  }
  static void Store(const Float& x, BFloat16* to) {
    for (size_t i = 0; i < kLanes; ++i) {
      to[i] = BFloat16::FromFloat(x.lanes[i]);
    }
  }
  static void Store(const Float& x, float* to) { std::copy_n(x.lanes, kLanes, to); }
  static Float Add(const Float& a, const Float& b) {
    return Make([&](size_t i) { return a.lanes[i] + b.lanes[i]; });
  }
  static Float Sub(const Float& a, const Float& b) {
    return Make([&](size_t i) { return a.lanes[i] - b.lanes[i]; });
  }
  static Float Mul(const Float& a, const Float& b) {
    return Make([&](size_t i) { return a.lanes[i] * b.lanes[i]; });
  }
  static Float Div(const Float& a, const Float& b) {
    return Make([&](size_t i) { return a.lanes[i] / b.lanes[i]; });
  }
  static Float MulAdd(const Float& a, const Float& b, const Float& sum) {
    return Make([&](size_t i) { return a.lanes[i] * b.lanes[i] + sum.lanes[i]; });
  }
  static Float Fma(const Float& a, const Float& b, const Float& sum) {
    return Make([&](size_t i) { return std::fma(a.lanes[i], b.lanes[i], sum.lanes[i]); });
  }
  static Float NegFma(const Float& a, const Float& b, const Float& sum) {
    return Make([&](size_t i) { return std::fma(-a.lanes[i], b.lanes[i], sum.lanes[i]); });
  }
  static Float Max(const Float& a, const Float& b) {
    return Make([&](size_t i) { return a.lanes[i] > b.lanes[i] ? a.lanes[i] : b.lanes[i]; });
  }
  static Float Min(const Float& a, const Float& b) {
    return Make([&](size_t i) { return a.lanes[i] < b.lanes[i] ? a.lanes[i] : b.lanes[i]; });
  }
  static Float Abs(const Float& x) {
    return Make([&](size_t i) { return std::fabs(x.lanes[i]); });
  }
  static Float Floor(const Float& x) {
    return Make([&](size_t i) { return std::floor(x.lanes[i]); });
  }
  static Float RoundToHalf(const Float& x) {
    return Make([&](size_t i) { return Float16::FromFloat(x.lanes[i]).ToFloat(); });
  }
  static float ReduceMax(const Float& x) { return *std::max_element(x.lanes, x.lanes + kLanes); }
  static float ReduceAdd(const Float& x) {
    float sum = 0;
    for (const float lane : x.lanes) {
      sum += lane;
    }
    return sum;
  }
  static Float Exp2(const Float& x) {
    return Make([&](size_t i) { return Exp2(x.lanes[i]); });
  }
  static constexpr float kRounding = 12582912.0f;
  static Float ClampPower(const Float& x) { return Max(x, Set(-126)); }
  static Float AddExponent(const Float& y, const Float& rounded) {
    return Make([&](size_t i) {
      const uint32_t exponent = std::bit_cast<uint32_t>(rounded.lanes[i]) << 23;
      return std::bit_cast<float>(std::bit_cast<uint32_t>(y.lanes[i]) + exponent);
    });
  }
  static Float MaxOfEach(const Float (&x)[4]) {
    return Make([&](size_t i) { return ReduceMax(x[i % 4]); });
  }
  static Float SumOfEach(const Float (&x)[4]) {
    return Make([&](size_t i) { return ReduceAdd(x[i % 4]); });
  }
  static Float SumEach(const Float (&x)[kLanes]) {
    return Make([&](size_t i) { return ReduceAdd(x[i]); });
  }

  // ---- Comparisons.
  static Mask Less(const Float& a, const Float& b) {
    Mask mask{};
    for (size_t i = 0; i < kLanes; ++i) {
      mask.lanes[i] = a.lanes[i] < b.lanes[i];
    }
    return mask;
  }
  static Float Select(const Mask& mask, const Float& a, const Float& b) {
    return Make([&](size_t i) { return mask.lanes[i] ? a.lanes[i] : b.lanes[i]; });
  }

  // ---- Whole numbers: 32-bit lanes, or four bytes a lane.
  static Int ZeroInt() { return SetInt(0); }
  static Int SetInt(int32_t x) {
    return MakeInt([=](size_t) { return static_cast<uint32_t>(x); });
  }
  static Int LoadInt(const void* from) {
    Int x{};
    std::memcpy(x.lanes, from, sizeof(x.lanes));
    return x;
  }
  static void StoreInt(const Int& x, void* to) { std::memcpy(to, x.lanes, sizeof(x.lanes)); }
  static Int And(const Int& a, const Int& b) {
    return MakeInt([&](size_t i) { return a.lanes[i] & b.lanes[i]; });
  }
  static Int ShiftRight4(const Int& x) {
    return MakeInt([&](size_t i) { return x.lanes[i] >> 4; });
  }
  // As in AVX2, sums of four products fit 16 bits.
  static Int Dot(const Int& sum, const Int& a, const Int& b, const Int& c, const Int& d) {
    Words products{};
    AddProducts(a, b, products);
    AddProducts(c, d, products);
    Int pairs{};
    std::memcpy(pairs.lanes, &products, sizeof(products));
    return MakeInt([&](size_t i) {
      const auto pair = static_cast<int32_t>(pairs.lanes[i]);
      return sum.lanes[i] + static_cast<uint32_t>((pair << 16 >> 16) + (pair >> 16));
    });
  }
  static Int ShiftRight8(const Int& x) {
    return MakeInt([&](size_t i) { return x.lanes[i] >> 8; });
  }
  static Float ToFloat(const Int& x) {
    return Make([&](size_t i) { return static_cast<float>(static_cast<int32_t>(x.lanes[i])); });
  }
  static Int Truncate(const Float& x) {
    return MakeInt([&](size_t i) {
      const float lane = x.lanes[i];  // Beyond int32, and for NaN, as x86 does.
      return lane > -2e9f && lane < 2e9f ? static_cast<uint32_t>(static_cast<int32_t>(lane))
                                         : 0x80000000u;
    });
  }
  static void StoreBytes(const Int& x, uint8_t* to) {
    for (size_t i = 0; i < kLanes; ++i) {
      to[i] = static_cast<uint8_t>(x.lanes[i]);
    }
  }

  static void Transpose(Float (&x)[kLanes]) {
    for (size_t r = 0; r < kLanes; ++r) {
      for (size_t l = 0; l < r; ++l) {
        std::swap(x[r].lanes[l], x[l].lanes[r]);
      }
    }
  }

  static void StoreHalf(const Float& x, uint16_t* to) {
    for (size_t i = 0; i < kLanes; ++i) {
      to[i] = Float16::FromFloat(x.lanes[i]).bits;
    }
  }

  static void SplitMeta(const void* pairs, float* scale, float* min) {
    uint16_t words[128];
    std::memcpy(words, pairs, sizeof(words));
    for (size_t g = 0; g < 8; ++g) {
      for (size_t i = 0; i < 8; ++i) {  // 4 * half + mt
        const size_t to = i / 4 * 32 + g * 4 + i % 4;
        scale[to] = Float16{words[2 * (8 * g + i)]}.ToFloat();
        min[to] = Float16{words[2 * (8 * g + i) + 1]}.ToFloat();
      }
    }
  }

  static void GatherQuads(const std::byte* base,
                          size_t quarter_stride,
                          size_t lane_stride,
                          Int (&out)[4]) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const std::byte* from = base + lane / 4 * quarter_stride + lane % 4 * lane_stride;
      for (size_t w = 0; w < 4; ++w) {
        out[w].lanes[lane] = LoadWord(from + 4 * w);
      }
    }
  }

  static void GatherPairs(const std::byte* base,
                          size_t quarter_stride,
                          size_t pair_stride,
                          Int (&out)[2]) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const std::byte* from = base + lane / 4 * quarter_stride + lane % 4 / 2 * pair_stride;
      for (size_t w = 0; w < 2; ++w) {
        out[w].lanes[lane] = LoadWord(from + 8 * (lane % 2) + 4 * w);
      }
    }
  }

 private:
  template <typename F>
  static Float Make(F lane) {
    Float x{};
    for (size_t i = 0; i < kLanes; ++i) {
      x.lanes[i] = lane(i);
    }
    return x;
  }
  template <typename F>
  static Int MakeInt(F lane) {
    Int x{};
    for (size_t i = 0; i < kLanes; ++i) {
      x.lanes[i] = lane(i);
    }
    return x;
  }
  static uint32_t LoadWord(const std::byte* from) {
    uint32_t word;
    std::memcpy(&word, from, sizeof(word));
    return word;
  }
  // Two 16-bit lanes in each lane of 32 bits; GCC and clang make of it what the processor has.
  using Words = int16_t __attribute__((vector_size(sizeof(Int))));
  // Adds to each 16 bits the two products of a's unsigned bytes with b's signed ones.
  static void AddProducts(const Int& a, const Int& b, Words& sums) {
    Words x;
    Words y;
    std::memcpy(&x, a.lanes, sizeof(x));
    std::memcpy(&y, b.lanes, sizeof(y));
    sums += (x & 0xff) * (y << 8 >> 8) + (x >> 8 & 0xff) * (y >> 8);
  }
  static float Exp2(float x) {
    x = x < -126.0f ? -126.0f : x;
    const float whole = std::nearbyint(x);
    const float f = x - whole;
    float y = 1.5403530e-4f;
    y = y * f + 1.3333558e-3f;
    y = y * f + 9.6181291e-3f;
    y = y * f + 5.5504109e-2f;
    y = y * f + 2.4022651e-1f;
    y = y * f + 6.9314718e-1f;
    y = y * f + 1.0f;
    if (!(whole <= 127.0f)) {  // NaN stays; beyond the range, infinity.
      return whole > 127.0f ? HUGE_VALF : x;
    }
    const auto exponent = static_cast<uint32_t>(static_cast<int32_t>(whole)) << 23;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(y) + exponent);
  }
};

}  // namespace
}  // namespace crumb::cpu
