// SPDX-License-Identifier: Apache-2.0
//
// Expansion with plain C++.
#include "cuda/cpu/expand_kernel.h"
#include "cuda/cpu/simd_portable.h"

namespace crumb::cpu {
namespace {

constexpr ExpandFunctions kFunctions = MakeExpandFunctions<Simd>();

}  // namespace

const ExpandFunctions& PortableExpandFunctions() {
  return kFunctions;
}

}  // namespace crumb::cpu
