// SPDX-License-Identifier: Apache-2.0
//
// Codes to rows, over the vector type `Simd` that the including file has defined. As in the twin,
// level = code * scale + minimum in float; the product is exact.
#pragma once

#include <cstddef>
#include <cstdint>

#include "proto/base/bfloat16.h"
#include "proto/page/page_format.h"

namespace crumb::cpu {

// One instruction set's kernels.
struct ExpandFunctions {
  // codes [kPageTokens, dim] with the rows' metadata as in the head block, to rows of the same
  // shape.
  void (*decode_to_bf16)(const uint8_t* codes, const std::byte* meta, size_t dim, BFloat16* rows);
  void (*decode_to_float)(const uint8_t* codes, const std::byte* meta, size_t dim, float* rows);
  // rows [kPageTokens, dim] + mean [dim] (nullable), rounded.
  void (*round)(const float* rows, const float* mean, size_t dim, BFloat16* rounded);
};

const ExpandFunctions& PortableExpandFunctions();
const ExpandFunctions& Avx2ExpandFunctions();
const ExpandFunctions& Avx512ExpandFunctions();

template <typename Simd>
class ExpandKernel {
 public:
  template <typename Out>
  static void Decode(const uint8_t* codes, const std::byte* meta, size_t dim, Out* rows) {
    alignas(64) float scales[kPageTokens];  // [2 halves][8 g][4 tiles]
    alignas(64) float minima[kPageTokens];
    Simd::SplitMeta(meta, scales, minima);
    for (size_t token = 0; token < kPageTokens; ++token) {
      const size_t at = token % 16 / 8 * 32 + token % 8 * 4 + token / 16;
      const Float scale = Simd::Set(scales[at]);
      const Float min = Simd::Set(minima[at]);
      for (size_t i = token * dim; i < (token + 1) * dim; i += Simd::kLanes) {
        Simd::Store(Simd::Add(Simd::Mul(Simd::LoadBytes(codes + i), scale), min), rows + i);
      }
    }
  }

  static void Round(const float* rows, const float* mean, size_t dim, BFloat16* rounded) {
    for (size_t i = 0; i < kPageTokens * dim; i += dim) {
      for (size_t channel = 0; channel < dim; channel += Simd::kLanes) {
        Float x = Simd::Load(rows + i + channel);
        if (mean != nullptr) {
          x = Simd::Add(x, Simd::Load(mean + channel));
        }
        Simd::Store(x, rounded + i + channel);
      }
    }
  }

 private:
  using Float = typename Simd::Float;
};

template <typename Simd>
constexpr ExpandFunctions MakeExpandFunctions() {
  return {.decode_to_bf16 = ExpandKernel<Simd>::template Decode<BFloat16>,
          .decode_to_float = ExpandKernel<Simd>::template Decode<float>,
          .round = ExpandKernel<Simd>::Round};
}

}  // namespace crumb::cpu
