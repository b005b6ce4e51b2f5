// SPDX-License-Identifier: Apache-2.0
//
// Rotation for any processor: vectors of four floats, which the compiler maps to what there is.
#include <cstring>

#include "cuda/cpu/rotate_kernel.h"

namespace crumb::cpu {
namespace {

struct Simd {
  using Vector = float __attribute__((vector_size(16)));
  static constexpr size_t kLanes = 4;
  static constexpr size_t kAccumulators = 12;

  static Vector Zero() { return Vector{}; }
  static Vector Load(const float* from) {
    Vector x;
    std::memcpy(&x, from, sizeof(x));
    return x;
  }
  static Vector Broadcast(const float* from) { return Vector{*from, *from, *from, *from}; }
  static Vector Fma(Vector x, Vector y, Vector sum) { return x * y + sum; }

  static Vector SumEach(const Vector (&x)[kLanes]) {
    Vector sums{};
    for (size_t lane = 0; lane < kLanes; ++lane) {
      sums += Vector{x[0][lane], x[1][lane], x[2][lane], x[3][lane]};
    }
    return sums;
  }

  static void Store(Vector x, float* to) { std::memcpy(to, &x, sizeof(x)); }
  static void Store(Vector x, BFloat16* to) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      to[lane] = BFloat16::FromFloat(x[lane]);
    }
  }
};

constexpr RotateFunctions kFunctions = MakeRotateFunctions<Simd>();

}  // namespace

const RotateFunctions& PortableRotateFunctions() {
  return kFunctions;
}

}  // namespace crumb::cpu
