// SPDX-License-Identifier: Apache-2.0
//
// Expansion with AVX-512 F, BW and VL.
#include "cuda/cpu/expand_kernel.h"
#include "cuda/cpu/simd_avx512.h"

namespace crumb::cpu {
namespace {

constexpr ExpandFunctions kFunctions = MakeExpandFunctions<Simd>();

}  // namespace

const ExpandFunctions& Avx512ExpandFunctions() {
  return kFunctions;
}

}  // namespace crumb::cpu
