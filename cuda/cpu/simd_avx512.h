// SPDX-License-Identifier: Apache-2.0
//
// The vector type of the codec's kernels in AVX-512 F, BW, VL, DQ and VNNI; simd_avx2.h and
// simd_portable.h are its siblings, with the same members. Included by files compiled for this
// instruction set alone; in an unnamed namespace, so that no other file's copy can be linked in.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "proto/base/bfloat16.h"

namespace crumb::cpu {
namespace {

// 2^-x of 16 bits: for whole 32nds (65535 is 1) and whole 1024ths (32768 is 1).
struct Powers {
  alignas(64) uint16_t high[32];
  alignas(64) uint16_t low[32];
};
constexpr Powers MakePowers() {
  Powers powers{};
  double high = 65535.5;
  double low = 32768.5;
  for (size_t i = 0; i < 32; ++i) {
    powers.high[i] = static_cast<uint16_t>(high);
    powers.low[i] = static_cast<uint16_t>(low);
    high = (high - 0.5) * 0.97857206208770009 + 0.5;  // 2^(-1 / 32)
    low = (low - 0.5) * 0.99932337926133756 + 0.5;    // 2^(-1 / 1024)
  }
  return powers;
}
inline constexpr Powers kPowers = MakePowers();

struct Simd {
  using Float = __m512;
  using Int = __m512i;
  using Mask = __mmask16;
  static constexpr size_t kLanes = 16;
  static constexpr size_t kRegisters = 32;
  static constexpr bool kHasShorts = true;

  // ---- Floats.
  static Float Zero() { return _mm512_setzero_ps(); }
  static Float Set(float x) { return _mm512_set1_ps(x); }
  static Float Load(const float* from) { return _mm512_loadu_ps(from); }
  static Float LoadBf16(const BFloat16* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static Float LoadBytes(const uint8_t* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
  }
  static void Store(Float x, float* to) { _mm512_storeu_ps(to, x); }
  // As BFloat16::FromFloat.
  static void Store(Float x, BFloat16* to) {
    const Int word = _mm512_castps_si512(x);
    const Int odd = And(_mm512_srli_epi32(word, 16), SetInt(1));
    const Int rounded = _mm512_add_epi32(_mm512_add_epi32(word, SetInt(0x7fff)), odd);
    const Int quiet = _mm512_or_si512(word, SetInt(0x00400000));
    const Mask is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const Int upper = _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, is_nan, quiet), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(upper));
  }
  static Float Add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float Sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
  static Float Mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float Div(Float a, Float b) { return _mm512_div_ps(a, b); }
  // a * b + sum, rounded once or twice.
  static Float MulAdd(Float a, Float b, Float sum) { return _mm512_fmadd_ps(a, b, sum); }
  // Fused: rounded once.
  static Float Fma(Float a, Float b, Float sum) { return _mm512_fmadd_ps(a, b, sum); }
  static Float NegFma(Float a, Float b, Float sum) {
    return _mm512_fnmadd_ps(a, b, sum);
  }  // sum - a * b
  // Where one is NaN, b.
  static Float Max(Float a, Float b) { return _mm512_max_ps(a, b); }
  static Float Min(Float a, Float b) { return _mm512_min_ps(a, b); }
  static Float Abs(Float x) { return _mm512_abs_ps(x); }
  static Float Floor(Float x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  }
  // Through fp16 and back, to nearest even.
  static Float RoundToHalf(Float x) { return _mm512_cvtph_ps(HalfBits(x)); }
  static float ReduceMax(Float x) { return _mm512_reduce_max_ps(x); }
  static float ReduceAdd(Float x) { return _mm512_reduce_add_ps(x); }
  // 2^x, relative error 2e-7; 0 below the range of float.
  static Float Exp2(Float x) {
    x = Max(Set(-200.0f), x);  // Not -infinity; a NaN stays one.
    const Float whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Float f = Sub(x, whole);
    Float y = Set(1.5403530e-4f);
    y = Fma(y, f, Set(1.3333558e-3f));
    y = Fma(y, f, Set(9.6181291e-3f));
    y = Fma(y, f, Set(5.5504109e-2f));
    y = Fma(y, f, Set(2.4022651e-1f));
    y = Fma(y, f, Set(6.9314718e-1f));
    y = Fma(y, f, Set(1.0f));
    return _mm512_scalef_ps(y, whole);
  }
  // What is added to it is rounded to a whole number.
  static constexpr float kRounding = 12582912.0f;  // 1.5 * 2^23
  // x, at least -126; for x up to 0 or a little more. A NaN may be lost.
  static Float ClampPower(Float x) {
    // As bits, what is further below zero is larger. An instruction of the pipes that add.
    const Int least = _mm512_castps_si512(Set(-126.0f));
    return _mm512_castsi512_ps(_mm512_min_epu32(_mm512_castps_si512(x), least));
  }
  // y * 2^k from y, 1 or near it, and k + kRounding.
  static Float AddExponent(Float y, Float rounded) {
    const Int exponent = _mm512_slli_epi32(_mm512_castps_si512(rounded), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), exponent));
  }
  // Lane r is the largest of x[r]'s lanes, or their sum, for r in 0..3; other lanes repeat them.
  static Float MaxOfEach(const Float (&x)[4]) {
    const Float low = Max(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const Float high = Max(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    Float y = Max(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
    y = Max(y, _mm512_shuffle_f32x4(y, y, 0x4e));
    return Max(y, _mm512_shuffle_f32x4(y, y, 0xb1));
  }
  static Float SumOfEach(const Float (&x)[4]) {
    const Float low = Add(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const Float high = Add(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    Float y = Add(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
    y = Add(y, _mm512_shuffle_f32x4(y, y, 0x4e));
    return Add(y, _mm512_shuffle_f32x4(y, y, 0xb1));
  }
  // Lane l is the sum of vector l's lanes. Each step halves the vectors and the lanes to be added.
  static Float SumEach(const Float (&x)[kLanes]) {
    Float fours[4];
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i) {
      const Float first = AddPairs(x[4 * i], x[4 * i + 1]);
      const Float second = AddPairs(x[4 * i + 2], x[4 * i + 3]);
      fours[i] = _mm512_add_ps(
          _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(first), _mm512_castps_pd(second))),
          _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(first), _mm512_castps_pd(second))));
    }
    return AddQuarters(AddQuarters(fours[0], fours[1]), AddQuarters(fours[2], fours[3]));
  }

  // ---- Comparisons.
  static Mask GreaterEqual(Float a, Float b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ);
  }
  static Mask Less(Float a, Float b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
  }
  static Float Select(Mask mask, Float a, Float b) {
    return _mm512_mask_blend_ps(mask, b, a);
  }

  // ---- Whole numbers: 32-bit lanes, or four bytes a lane.
  static Int ZeroInt() {
    return _mm512_setzero_si512();
  }
  static Int SetInt(int32_t x) {
    return _mm512_set1_epi32(x);
  }
  static Int LoadInt(const void* from) {
    return _mm512_loadu_si512(from);
  }
  static void StoreInt(Int x, void* to) {
    _mm512_storeu_si512(to, x);
  }
  static Int And(Int a, Int b) {
    return _mm512_and_si512(a, b);
  }
  static Int ShiftRight4(Int x) {
    return _mm512_srli_epi32(x, 4);
  }
  // sum + the eight products of a lane's unsigned bytes a and c with signed ones b and d.
  // By hand: of the intrinsic GCC 12 makes copies of sums, for which there are no registers.
  static Int Dot(Int sum, Int a, Int b, Int c, Int d) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(c), "v"(d));
    return sum;
  }
  static Int ShiftRight8(Int x) {
    return _mm512_srli_epi32(x, 8);
  }
  static Float ToFloat(Int x) {
    return _mm512_cvtepi32_ps(x);
  }
  static Int Truncate(Float x) {
    return _mm512_cvttps_epi32(x);
  }
  // The low byte of each lane.
  static void StoreBytes(Int x, uint8_t* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x));
  }

  // ---- Whole numbers of 16 bits: 32 lanes.
  static Int SetShort(int16_t x) {
    return _mm512_set1_epi16(x);
  }
  // Lanes of a, then of b, quarter by quarter: to nearest, 0 below, 65535 above, and for NaN.
  static Int PackShorts(Float a, Float b) {
    return _mm512_packus_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b));
  }
  // The same with a sign.
  static Int PackSignedShorts(Float a, Float b) {
    return _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b));
  }
  static Int AddShorts(Int a, Int b) {
    return _mm512_add_epi16(a, b);
  }
  // The upper halves of the products of unsigned lanes.
  static Int MulShortsHigh(Int a, Int b) {
    return _mm512_mulhi_epu16(a, b);
  }
  static Int ShiftShortsRight7(Int x) {
    return _mm512_srli_epi16(x, 7);
  }
  // sum + the two products of a 32-bit lane's signed lanes.
  static Int DotShorts(Int sum, Int a, Int b) {
    return _mm512_dpwssd_epi32(sum, a, b);
  }
  // 2^(15 - y / kPowerSteps), at most 32767.
  static constexpr float kPowerSteps = 1024;
  static Int NegativePower(Int y) {
    const Int high = _mm512_permutexvar_epi16(_mm512_srli_epi16(y, 5), LoadInt(kPowers.high));
    const Int low = _mm512_permutexvar_epi16(y, LoadInt(kPowers.low));
    return _mm512_srlv_epi16(_mm512_mulhi_epu16(high, low), _mm512_srli_epi16(y, 10));
  }
  // 64 lanes below 256, in the order of PackShorts, as bytes in the order of what was packed.
  static void StoreShortsAsBytes(const Int (&x)[2], void* to) {
    const Int order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    StoreInt(_mm512_permutexvar_epi32(order, _mm512_packus_epi16(x[0], x[1])), to);
  }

  // 64 pairs of fp16 (scale, min), [8][2][4], to floats [2][8][4]. Scales are not negative, and all
  // are finite.
  static void SplitMeta(const void* pairs, float* scale, float* min) {
    const auto* from = static_cast<const std::byte*>(pairs);
#pragma GCC unroll 2
    for (size_t i = 0; i < 2; ++i) {
      const __m512i first = _mm512_loadu_si512(from + 128 * i);
      const __m512i second = _mm512_loadu_si512(from + 128 * i + 64);
      const __m512i halves[2] = {_mm512_shuffle_i32x4(first, second, 0x88),
                                 _mm512_shuffle_i32x4(first, second, 0xdd)};
#pragma GCC unroll 2
      for (size_t half = 0; half < 2; ++half) {
        const size_t at = 32 * half + 16 * i;
        Store(ShiftedHalf(_mm512_slli_epi32(halves[half], 13), 0x0fffe000), scale + at);
        Store(ShiftedHalf(_mm512_srai_epi32(halves[half], 3), 0x8fffe000), min + at);
      }
    }
  }

  // Four words at each of kLanes places: lane 4 l + m of out[w] is word w at
  // base + l * quarter_stride + m * lane_stride. A quarter is four lanes.
  static void GatherQuads(const std::byte* base,
                          size_t quarter_stride,
                          size_t lane_stride,
                          Int (&out)[4]) {
    const Int a = LoadQuarters(base, quarter_stride);
    const Int b = LoadQuarters(base + lane_stride, quarter_stride);
    const Int c = LoadQuarters(base + 2 * lane_stride, quarter_stride);
    const Int d = LoadQuarters(base + 3 * lane_stride, quarter_stride);
    const Int ab_low = _mm512_unpacklo_epi32(a, b);
    const Int ab_high = _mm512_unpackhi_epi32(a, b);
    const Int cd_low = _mm512_unpacklo_epi32(c, d);
    const Int cd_high = _mm512_unpackhi_epi32(c, d);
    out[0] = _mm512_unpacklo_epi64(ab_low, cd_low);
    out[1] = _mm512_unpackhi_epi64(ab_low, cd_low);
    out[2] = _mm512_unpacklo_epi64(ab_high, cd_high);
    out[3] = _mm512_unpackhi_epi64(ab_high, cd_high);
  }

  // Two words, [2 r][2 w] of four, at each place: lane 4 l + 2 c + r of out[w] is word (r, w) at
  // base + l * quarter_stride + c * pair_stride.
  static void GatherPairs(const std::byte* base,
                          size_t quarter_stride,
                          size_t pair_stride,
                          Int (&out)[2]) {
    const Float a = _mm512_castsi512_ps(LoadQuarters(base, quarter_stride));
    const Float b = _mm512_castsi512_ps(LoadQuarters(base + pair_stride, quarter_stride));
    out[0] = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88));
    out[1] = _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd));
  }

  // Row r, lane l becomes row l, lane r.
  static void Transpose(Float (&x)[kLanes]) {
    Float quads[4][4];  // [group of four rows][lane in a quarter]
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i) {
      const Float ab_low = _mm512_unpacklo_ps(x[4 * i], x[4 * i + 1]);
      const Float ab_high = _mm512_unpackhi_ps(x[4 * i], x[4 * i + 1]);
      const Float cd_low = _mm512_unpacklo_ps(x[4 * i + 2], x[4 * i + 3]);
      const Float cd_high = _mm512_unpackhi_ps(x[4 * i + 2], x[4 * i + 3]);
      quads[i][0] = _mm512_shuffle_ps(ab_low, cd_low, 0x44);
      quads[i][1] = _mm512_shuffle_ps(ab_low, cd_low, 0xee);
      quads[i][2] = _mm512_shuffle_ps(ab_high, cd_high, 0x44);
      quads[i][3] = _mm512_shuffle_ps(ab_high, cd_high, 0xee);
    }
#pragma GCC unroll 4
    for (size_t w = 0; w < 4; ++w) {
      const Float low01 = _mm512_shuffle_f32x4(quads[0][w], quads[1][w], 0x44);
      const Float high01 = _mm512_shuffle_f32x4(quads[0][w], quads[1][w], 0xee);
      const Float low23 = _mm512_shuffle_f32x4(quads[2][w], quads[3][w], 0x44);
      const Float high23 = _mm512_shuffle_f32x4(quads[2][w], quads[3][w], 0xee);
      x[w] = _mm512_shuffle_f32x4(low01, low23, 0x88);
      x[4 + w] = _mm512_shuffle_f32x4(low01, low23, 0xdd);
      x[8 + w] = _mm512_shuffle_f32x4(high01, high23, 0x88);
      x[12 + w] = _mm512_shuffle_f32x4(high01, high23, 0xdd);
    }
  }

  // As fp16, rounded to nearest even.
  static void StoreHalf(Float x, uint16_t* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), HalfBits(x));
  }

 private:
  static __m256i HalfBits(Float x) {
    return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // From fp16 whose exponent and mantissa stand where a float's end and begin; `mask` has these,
  // and the sign at the top or not.
  static Float ShiftedHalf(Int x, uint32_t mask) {
    const Int bits = And(x, SetInt(static_cast<int32_t>(mask)));
    return Mul(_mm512_castsi512_ps(bits), Set(0x1p112f));
  }
  // Quarter l is 16 bytes at base + l * stride. Put together in halves: only one step of three then
  // needs a pipe that shuffles, the others come with their loads.
  static Int LoadQuarters(const std::byte* base, size_t stride) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(LoadHalves(base, stride)),
                              LoadHalves(base + 2 * stride, stride), 1);
  }
  static __m256i LoadHalves(const std::byte* base, size_t stride) {
    return _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(base))),
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(base + stride)), 1);
  }
  static Float AddPairs(Float a, Float b) {
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  static Float AddQuarters(Float a, Float b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
};

}  // namespace
}  // namespace crumb::cpu
