// SPDX-License-Identifier: Apache-2.0
//
// The vector type of the codec's kernels in AVX2, FMA and F16C; see simd_avx512.h.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "proto/base/bfloat16.h"

namespace crumb::cpu {
namespace {

struct Simd {
  using Float = __m256;
  using Int = __m256i;
  using Mask = __m256;
  static constexpr size_t kLanes = 8;
  static constexpr size_t kRegisters = 16;
  static constexpr bool kHasShorts = false;

  // ---- Floats.
  static Float Zero() { return _mm256_setzero_ps(); }
  static Float Set(float x) { return _mm256_set1_ps(x); }
  static Float Load(const float* from) { return _mm256_loadu_ps(from); }
  static Float LoadBf16(const BFloat16* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static Float LoadBytes(const uint8_t* from) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
  }
  static void Store(Float x, float* to) { _mm256_storeu_ps(to, x); }
  static void Store(Float x, BFloat16* to) {
    const Int word = _mm256_castps_si256(x);
    const Int odd = And(_mm256_srli_epi32(word, 16), SetInt(1));
    const Int rounded = _mm256_add_epi32(_mm256_add_epi32(word, SetInt(0x7fff)), odd);
    const Int quiet = _mm256_or_si256(word, SetInt(0x00400000));
    const Int is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const Int upper = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(to),
        _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1)));
  }
  static Float Add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static Float Sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
  static Float Mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float Div(Float a, Float b) { return _mm256_div_ps(a, b); }
  static Float MulAdd(Float a, Float b, Float sum) { return _mm256_fmadd_ps(a, b, sum); }
  static Float Fma(Float a, Float b, Float sum) { return _mm256_fmadd_ps(a, b, sum); }
  static Float NegFma(Float a, Float b, Float sum) { return _mm256_fnmadd_ps(a, b, sum); }
  static Float Max(Float a, Float b) { return _mm256_max_ps(a, b); }
  static Float Min(Float a, Float b) { return _mm256_min_ps(a, b); }
  static Float Abs(Float x) { return _mm256_andnot_ps(Set(-0.0f), x); }
  static Float Floor(Float x) { return _mm256_floor_ps(x); }
  static Float RoundToHalf(Float x) { return _mm256_cvtph_ps(HalfBits(x)); }
  static float ReduceMax(Float x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
  }
  static float ReduceAdd(Float x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
  }
  static Float Exp2(Float x) {
    x = Max(Set(-126.0f), x);  // A NaN stays one.
    const Float whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Float f = Sub(x, whole);
    Float y = Set(1.5403530e-4f);
    y = Fma(y, f, Set(1.3333558e-3f));
    y = Fma(y, f, Set(9.6181291e-3f));
    y = Fma(y, f, Set(5.5504109e-2f));
    y = Fma(y, f, Set(2.4022651e-1f));
    y = Fma(y, f, Set(6.9314718e-1f));
    y = Fma(y, f, Set(1.0f));
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), exponent));
  }
  static constexpr float kRounding = 12582912.0f;  // 1.5 * 2^23
  static Float ClampPower(Float x) {
    const Int least = _mm256_castps_si256(Set(-126.0f));
    return _mm256_castsi256_ps(_mm256_min_epu32(_mm256_castps_si256(x), least));
  }
  static Float AddExponent(Float y, Float rounded) {
    const Int exponent = _mm256_slli_epi32(_mm256_castps_si256(rounded), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), exponent));
  }
  static Float MaxOfEach(const Float (&x)[4]) {
    const Float low = Max(_mm256_unpacklo_ps(x[0], x[1]), _mm256_unpackhi_ps(x[0], x[1]));
    const Float high = Max(_mm256_unpacklo_ps(x[2], x[3]), _mm256_unpackhi_ps(x[2], x[3]));
    const Float y = Max(_mm256_shuffle_ps(low, high, 0x44), _mm256_shuffle_ps(low, high, 0xee));
    return Max(y, _mm256_permute2f128_ps(y, y, 0x01));
  }
  static Float SumOfEach(const Float (&x)[4]) {
    const Float y = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    return Add(y, _mm256_permute2f128_ps(y, y, 0x01));
  }
  static Float SumEach(const Float (&x)[kLanes]) {
    const Float a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    const Float b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
    return Add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  }

  // ---- Comparisons.
  static Mask Less(Float a, Float b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  static Float Select(Mask mask, Float a, Float b) { return _mm256_blendv_ps(b, a, mask); }

  // ---- Whole numbers: 32-bit lanes, or four bytes a lane.
  static Int ZeroInt() { return _mm256_setzero_si256(); }
  static Int SetInt(int32_t x) { return _mm256_set1_epi32(x); }
  static Int LoadInt(const void* from) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
  }
  static void StoreInt(Int x, void* to) { _mm256_storeu_si256(static_cast<__m256i*>(to), x); }
  static Int And(Int a, Int b) { return _mm256_and_si256(a, b); }
  static Int ShiftRight4(Int x) { return _mm256_srli_epi32(x, 4); }
  // The sums of four products must fit 16 bits: they do while one operand is a code, at most 12.
  static Int Dot(Int sum, Int a, Int b, Int c, Int d) {
    const Int fours = _mm256_add_epi16(_mm256_maddubs_epi16(a, b), _mm256_maddubs_epi16(c, d));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(fours, _mm256_set1_epi16(1)));
  }
  static Int ShiftRight8(Int x) { return _mm256_srli_epi32(x, 8); }
  static Float ToFloat(Int x) { return _mm256_cvtepi32_ps(x); }
  static Int Truncate(Float x) { return _mm256_cvttps_epi32(x); }
  static void StoreBytes(Int x, uint8_t* to) {
    const Int low = And(x, SetInt(0xff));
    const __m128i words =
        _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(words, words));
  }

  static void SplitMeta(const void* pairs, float* scale, float* min) {
    const auto* from = static_cast<const std::byte*>(pairs);
    for (size_t g = 0; g < 8; ++g) {
      const Int x = LoadInt(from + 32 * g);  // Both halves' four pairs.
      const Int halves = _mm256_permute4x64_epi64(
          _mm256_shuffle_epi8(
              x, _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5,
                                  8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15)),
          0xd8);  // Scales of both halves, then minima.
      const Float scales = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
      const Float minima = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
      _mm_storeu_ps(scale + 4 * g, _mm256_castps256_ps128(scales));
      _mm_storeu_ps(scale + 32 + 4 * g, _mm256_extractf128_ps(scales, 1));
      _mm_storeu_ps(min + 4 * g, _mm256_castps256_ps128(minima));
      _mm_storeu_ps(min + 32 + 4 * g, _mm256_extractf128_ps(minima, 1));
    }
  }

  static void GatherQuads(const std::byte* base,
                          size_t quarter_stride,
                          size_t lane_stride,
                          Int (&out)[4]) {
    const Int a = LoadQuarters(base, quarter_stride);
    const Int b = LoadQuarters(base + lane_stride, quarter_stride);
    const Int c = LoadQuarters(base + 2 * lane_stride, quarter_stride);
    const Int d = LoadQuarters(base + 3 * lane_stride, quarter_stride);
    const Int ab_low = _mm256_unpacklo_epi32(a, b);
    const Int ab_high = _mm256_unpackhi_epi32(a, b);
    const Int cd_low = _mm256_unpacklo_epi32(c, d);
    const Int cd_high = _mm256_unpackhi_epi32(c, d);
    out[0] = _mm256_unpacklo_epi64(ab_low, cd_low);
    out[1] = _mm256_unpackhi_epi64(ab_low, cd_low);
    out[2] = _mm256_unpacklo_epi64(ab_high, cd_high);
    out[3] = _mm256_unpackhi_epi64(ab_high, cd_high);
  }

  static void GatherPairs(const std::byte* base,
                          size_t quarter_stride,
                          size_t pair_stride,
                          Int (&out)[2]) {
    const Float a = _mm256_castsi256_ps(LoadQuarters(base, quarter_stride));
    const Float b = _mm256_castsi256_ps(LoadQuarters(base + pair_stride, quarter_stride));
    out[0] = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88));
    out[1] = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd));
  }

  static void Transpose(Float (&x)[kLanes]) {
    Float quads[2][4];
#pragma GCC unroll 2
    for (size_t i = 0; i < 2; ++i) {
      const Float ab_low = _mm256_unpacklo_ps(x[4 * i], x[4 * i + 1]);
      const Float ab_high = _mm256_unpackhi_ps(x[4 * i], x[4 * i + 1]);
      const Float cd_low = _mm256_unpacklo_ps(x[4 * i + 2], x[4 * i + 3]);
      const Float cd_high = _mm256_unpackhi_ps(x[4 * i + 2], x[4 * i + 3]);
      quads[i][0] = _mm256_shuffle_ps(ab_low, cd_low, 0x44);
      quads[i][1] = _mm256_shuffle_ps(ab_low, cd_low, 0xee);
      quads[i][2] = _mm256_shuffle_ps(ab_high, cd_high, 0x44);
      quads[i][3] = _mm256_shuffle_ps(ab_high, cd_high, 0xee);
    }
#pragma GCC unroll 4
    for (size_t w = 0; w < 4; ++w) {
      x[w] = _mm256_permute2f128_ps(quads[0][w], quads[1][w], 0x20);
      x[4 + w] = _mm256_permute2f128_ps(quads[0][w], quads[1][w], 0x31);
    }
  }

  static void StoreHalf(Float x, uint16_t* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), HalfBits(x));
  }

 private:
  static __m128i HalfBits(Float x) {
    return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static Int LoadQuarters(const std::byte* base, size_t stride) {
    return _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(base))),
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(base + stride)), 1);
  }
};

}  // namespace
}  // namespace crumb::cpu
