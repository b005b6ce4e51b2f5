// SPDX-License-Identifier: Apache-2.0
//
// Rotation with AVX2 and FMA.
#include <immintrin.h>

#include "cuda/cpu/rotate_kernel.h"

namespace crumb::cpu {
namespace {

struct Simd {
  using Vector = __m256;
  static constexpr size_t kLanes = 8;
  static constexpr size_t kAccumulators = 12;  // Of 16 registers: two hold R, one the row.

  static Vector Zero() { return _mm256_setzero_ps(); }
  static Vector Load(const float* from) { return _mm256_loadu_ps(from); }
  static Vector Broadcast(const float* from) { return _mm256_broadcast_ss(from); }
  static Vector Fma(Vector x, Vector y, Vector sum) { return _mm256_fmadd_ps(x, y, sum); }

  // Each step halves the vectors and the lanes that are still to be added.
  static Vector SumEach(const Vector (&x)[kLanes]) {
    const Vector low = AddFours(AddPairs(x[0], x[1]), AddPairs(x[2], x[3]));
    const Vector high = AddFours(AddPairs(x[4], x[5]), AddPairs(x[6], x[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20),
                         _mm256_permute2f128_ps(low, high, 0x31));
  }

  static void Store(Vector x, float* to) { _mm256_storeu_ps(to, x); }
  static void Store(Vector x, BFloat16* to) {
    const __m256i word = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(word, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(_mm256_add_epi32(word, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(word, _mm256_set1_epi32(0x00400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i upper = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    const __m128i packed =
        _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
  }

 private:
  static Vector AddPairs(Vector a, Vector b) {
    return _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  }
  static Vector AddFours(Vector ab, Vector cd) {
    const __m256d x = _mm256_castps_pd(ab);
    const __m256d y = _mm256_castps_pd(cd);
    return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)),
                         _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
  }
};

constexpr RotateFunctions kFunctions = MakeRotateFunctions<Simd>();

}  // namespace

const RotateFunctions& Avx2RotateFunctions() {
  return kFunctions;
}

}  // namespace crumb::cpu
