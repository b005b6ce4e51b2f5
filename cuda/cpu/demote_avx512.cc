// SPDX-License-Identifier: Apache-2.0
//
// Demotion with AVX-512 F, BW, VL and DQ.
#include "cuda/cpu/demote_kernel.h"
#include "cuda/cpu/simd_avx512.h"

namespace crumb::cpu {

void DemoteRowsAvx512(const DemoteArgs& args) {
  DemoteKernel<Simd>::DemoteRows(args);
}

}  // namespace crumb::cpu
