// SPDX-License-Identifier: Apache-2.0
#include "cuda/reference/rotate.h"

namespace crumb::reference {

void RotateRow(std::span<const float> row,
               std::span<const float> mean,
               std::span<const float> rotation,
               std::span<float> out) {
  const size_t dim = row.size();
  for (size_t column = 0; column < dim; ++column) {
    double sum = 0;
    for (size_t k = 0; k < dim; ++k) {
      const double x = mean.empty() ? double{row[k]} : double{row[k]} - double{mean[k]};
      sum += x * double{rotation[k * dim + column]};
    }
    out[column] = static_cast<float>(sum);
  }
}

void RotateRowBack(std::span<const float> row,
                   std::span<const float> rotation,
                   std::span<float> out) {
  const size_t dim = row.size();
  for (size_t column = 0; column < dim; ++column) {
    double sum = 0;
    for (size_t k = 0; k < dim; ++k) {
      sum += double{row[k]} * double{rotation[column * dim + k]};
    }
    out[column] = static_cast<float>(sum);
  }
}

}  // namespace crumb::reference
