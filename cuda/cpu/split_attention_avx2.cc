// SPDX-License-Identifier: Apache-2.0
//
// Split attention with AVX2, FMA and F16C.
#include "cuda/cpu/history_kernel.h"
#include "cuda/cpu/simd_avx2.h"
#include "cuda/cpu/window_kernel.h"

namespace crumb::cpu {
namespace {

constexpr SplitAttentionFunctions kFunctions = {
    .attend_history = HistoryKernel<Simd>::Attend,
    .attend_window = WindowKernel<Simd>::AttendWindow,
};

}  // namespace

const SplitAttentionFunctions& Avx2SplitAttentionFunctions() {
  return kFunctions;
}

}  // namespace crumb::cpu
