// SPDX-License-Identifier: Apache-2.0
//
// Rotation with AVX-512 (F, BW, VL, DQ).
#include <immintrin.h>

#include "cuda/cpu/rotate_kernel.h"

namespace crumb::cpu {
namespace {

struct Simd {
  using Vector = __m512;
  static constexpr size_t kLanes = 16;
  static constexpr size_t kAccumulators = 28;  // Of 32 registers: two hold R, one the row.

  static Vector Zero() { return _mm512_setzero_ps(); }
  static Vector Load(const float* from) { return _mm512_loadu_ps(from); }
  static Vector Broadcast(const float* from) { return _mm512_set1_ps(*from); }
  static Vector Fma(Vector x, Vector y, Vector sum) { return _mm512_fmadd_ps(x, y, sum); }

  // Each step halves the vectors and the lanes that are still to be added.
  static Vector SumEach(const Vector (&x)[kLanes]) {
    Vector fours[4];
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i) {
      const Vector first = AddPairs(x[4 * i], x[4 * i + 1]);
      const Vector second = AddPairs(x[4 * i + 2], x[4 * i + 3]);
      fours[i] = _mm512_add_ps(
          _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(first), _mm512_castps_pd(second))),
          _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(first), _mm512_castps_pd(second))));
    }
    return AddQuarters(AddQuarters(fours[0], fours[1]), AddQuarters(fours[2], fours[3]));
  }

  static void Store(Vector x, float* to) {
    _mm512_storeu_ps(to, x);
  }
  static void Store(Vector x, BFloat16* to) {
    const __m512i word = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(word, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(_mm512_add_epi32(word, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i quiet = _mm512_or_si512(word, _mm512_set1_epi32(0x00400000));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i upper = _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, is_nan, quiet), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(upper));
  }

 private:
  static Vector AddPairs(Vector a, Vector b) {
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  static Vector AddQuarters(Vector a, Vector b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
};

constexpr RotateFunctions kFunctions = MakeRotateFunctions<Simd>();

}  // namespace

const RotateFunctions& Avx512RotateFunctions() {
  return kFunctions;
}

}  // namespace crumb::cpu
