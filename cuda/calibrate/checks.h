// SPDX-License-Identifier: Apache-2.0
//
// What inspect and verify compute of a matrix. Matrices are [dim, dim], row-major, dense.
// Thread-safe.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace crumb::calibrate {

// The largest |A B^T - I|. For a rotation A = B; under oscar-int2-tilted B is that of queries. A
// float matrix that was made in double and rounded has about 3e-8 at head_dim 128.
double InverseError(std::span<const float> a, std::span<const float> b, size_t dim);

// The largest |d_i / mean(d) - 1| of d, the diagonal of R^T M R: 0 when every channel carries as
// much, which is what a Hadamard matrix after the eigenvectors is for. 0 if the diagonal is.
double DiagonalSpread(std::span<const double> moment, std::span<const float> rotation, size_t dim);

struct Spectrum {
  double largest = 0;     // The share of the largest eigenvalue in their sum.
  size_t num_for_90 = 0;  // How many of the largest make 90 % of the sum.
};
// Of a symmetric matrix; negative eigenvalues count as zero.
Spectrum SpectrumOf(std::span<const double> moment, size_t dim);

}  // namespace crumb::calibrate
