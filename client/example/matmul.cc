// SPDX-License-Identifier: Apache-2.0
#include "client/example/matmul.h"

#include <algorithm>

#include "client/example/matmul_kernel.h"
#include "crumb/cuda/cpu_path.h"

namespace crumb::example {
namespace {

// A worker's rows are a multiple of this: whole cache lines of `out`, whole registers of rows.
constexpr uint32_t kRowGranule = 48;

MatMulKernel* ChooseKernel() {
  const CpuPath path = BestCpuPath();
  // With AVX-512, Eigen 3.4 was no faster on the AMD EPYC that it was measured on.
  return path == CpuPath::kAvx2 || path == CpuPath::kAvx512 ? MatMulAvx2 : MatMulPortable;
}

}  // namespace

void MatMul(
    const MatrixView& weights, const float* in, uint32_t num_tokens, float* out, WorkerTeam& team) {
  static MatMulKernel* const kKernel = ChooseKernel();
  const uint32_t granules = (weights.rows + kRowGranule - 1) / kRowGranule;
  const uint32_t share = (granules + team.num_workers() - 1) / team.num_workers() * kRowGranule;
  team.Run([&](uint32_t worker) {
    const uint32_t first = std::min(weights.rows, worker * share);
    const uint32_t end = std::min(weights.rows, first + share);
    if (first < end) {
      kKernel(weights, first, end - first, in, num_tokens, out);
    }
  });
}

}  // namespace crumb::example
