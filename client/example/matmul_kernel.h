// SPDX-License-Identifier: Apache-2.0
//
// matmul_kernel.cc is compiled once for each of these. To be used by matmul.cc only.
#pragma once

#include <cstdint>

#include "client/example/matmul.h"

namespace crumb::example {

// Rows [first_row, first_row + num_rows) of the weights; writes those columns of `out`.
using MatMulKernel = void(const MatrixView& weights,
                          uint32_t first_row,
                          uint32_t num_rows,
                          const float* in,
                          uint32_t num_tokens,
                          float* out);
MatMulKernel MatMulPortable;
MatMulKernel MatMulAvx2;

}  // namespace crumb::example
