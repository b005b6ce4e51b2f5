// SPDX-License-Identifier: Apache-2.0
//
// The one matrix product of a transformer: activations times the transpose of a weight matrix. By
// Eigen, compiled once for each instruction set and chosen at run time.
#pragma once

#include <cstdint>

#include "client/example/worker_team.h"

namespace crumb::example {

// A weight matrix, row-major: [rows, columns] f32.
struct MatrixView {
  const float* data = nullptr;
  uint32_t rows = 0;
  uint32_t columns = 0;
};

// out = in * weights^T. `in` [num_tokens, weights.columns], `out` [num_tokens, weights.rows],
// dense, not overlapping. Rows of the weights are spread over the team. Deterministic for equal
// shapes and equal teams; other shapes may add in another order.
void MatMul(
    const MatrixView& weights, const float* in, uint32_t num_tokens, float* out, WorkerTeam& team);

}  // namespace crumb::example
