// SPDX-License-Identifier: Apache-2.0
//
// Demotion with plain C++.
#include "cuda/cpu/demote_kernel.h"
#include "cuda/cpu/simd_portable.h"

namespace crumb::cpu {

void DemoteRowsPortable(const DemoteArgs& args) {
  DemoteKernel<Simd>::DemoteRows(args);
}

}  // namespace crumb::cpu
