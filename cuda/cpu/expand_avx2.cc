// SPDX-License-Identifier: Apache-2.0
//
// Expansion with AVX2 and F16C.
#include "cuda/cpu/expand_kernel.h"
#include "cuda/cpu/simd_avx2.h"

namespace crumb::cpu {
namespace {

constexpr ExpandFunctions kFunctions = MakeExpandFunctions<Simd>();

}  // namespace

const ExpandFunctions& Avx2ExpandFunctions() {
  return kFunctions;
}

}  // namespace crumb::cpu
