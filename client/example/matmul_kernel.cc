// SPDX-License-Identifier: Apache-2.0
//
// Compiled once for each instruction set, with CRUMB_MATMUL naming the function and Eigen renaming
// Eigen's namespace: its templates would otherwise have one name in all of them, and the linker
// would keep whichever came first, on machines that cannot run it too.
#define EIGEN_DONT_PARALLELIZE
#include "client/example/matmul_kernel.h"

#include <Eigen/Core>

namespace crumb::example {

void CRUMB_MATMUL(const MatrixView& weights,
                  uint32_t first_row,
                  uint32_t num_rows,
                  const float* in,
                  uint32_t num_tokens,
                  float* out) {
  using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::Map<const RowMajor> rows(weights.data + size_t{first_row} * weights.columns,
                                        num_rows, weights.columns);
  if (num_tokens == 1) {
    const Eigen::Map<const Eigen::VectorXf> column(in, weights.columns);
    Eigen::Map<Eigen::VectorXf>(out + first_row, num_rows).noalias() = rows * column;
    return;
  }
  const Eigen::Map<const RowMajor> tokens(in, num_tokens, weights.columns);
  const Eigen::OuterStride<> stride(weights.rows);
  Eigen::Map<RowMajor, 0, Eigen::OuterStride<>>(out + first_row, num_tokens, num_rows, stride)
      .noalias() = tokens * rows.transpose();
}

}  // namespace crumb::example
