// SPDX-License-Identifier: Apache-2.0
//
// Demotion with AVX2, FMA and F16C.
#include "cuda/cpu/demote_kernel.h"
#include "cuda/cpu/simd_avx2.h"

namespace crumb::cpu {

void DemoteRowsAvx2(const DemoteArgs& args) {
  DemoteKernel<Simd>::DemoteRows(args);
}

}  // namespace crumb::cpu
