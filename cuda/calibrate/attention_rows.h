// SPDX-License-Identifier: Apache-2.0
//
// The rows of one layer of one text, as an engine hands them over, and views of a head's.
#pragma once

#include <cstddef>
#include <span>

#include <Eigen/Core>

namespace crumb::calibrate {

struct TokenRows {
  const char* name;
  std::span<const float> floats;  // [T, num_heads, dim]
  size_t num_heads;
  size_t dim;

  size_t num_tokens() const { return floats.size() / (num_heads * dim); }
  std::span<const float> Row(size_t token, size_t head) const {
    return floats.subspan((token * num_heads + head) * dim, dim);
  }
};

using RowsF32 = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using HeadView = Eigen::Map<const RowsF32, 0, Eigen::OuterStride<>>;

// Every `stride`-th row of one head from token `first` on: [ceil((T - first) / stride), dim].
inline HeadView ViewHead(const TokenRows& rows, size_t head, size_t first, size_t stride = 1) {
  const size_t num_tokens = rows.num_tokens();
  const size_t count = first < num_tokens ? (num_tokens - first + stride - 1) / stride : 0;
  return {rows.floats.data() + (first * rows.num_heads + head) * rows.dim,
          static_cast<Eigen::Index>(count), static_cast<Eigen::Index>(rows.dim),
          Eigen::OuterStride<>(static_cast<Eigen::Index>(stride * rows.num_heads * rows.dim))};
}

}  // namespace crumb::calibrate
