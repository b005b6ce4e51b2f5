// SPDX-License-Identifier: Apache-2.0
//
// The linear algebra of a fit, one matrix at a time. Matrices are [dim, dim], row-major, dense; dim
// is a power of two.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "absl/status/statusor.h"

namespace crumb::calibrate {

using DoubleMatrix = std::vector<double>;
using FloatMatrix = std::vector<float>;

constexpr bool IsPowerOfTwo(size_t dim) {
  return dim != 0 && (dim & (dim - 1)) == 0;
}

// Sylvester's matrix over sqrt(dim): orthogonal, symmetric, each element +-1/sqrt(dim).
DoubleMatrix Hadamard(size_t dim);

// U H P of a symmetric `covariance`. INVALID_ARGUMENT: no eigenvectors (its size overflows).
absl::StatusOr<DoubleMatrix> OscarRotation(std::span<const double> covariance, size_t dim);

// What oscar-int2-tilted does to keys before they are rounded: row vectors are stored as row * keys
// and read by query * queries, queries = keys^-T.
struct ScaledRotation {
  DoubleMatrix keys;
  DoubleMatrix queries;
  DoubleMatrix metric;  // As scaled rows see it, before the rotation.
};

struct ScaleOptions {
  bool hadamard_alone = false;
  std::span<const double> guide = {};  // What U are the eigenvectors of, instead of the metric.
};

// keys = s S^(-1/4) R, with S the keys' `scatter` (their covariance) damped by kScatterDamping of
// its mean diagonal, s such that rows are as large as they were, and R the rotation of `metric` as
// these rows see it: U H P, or H alone. Half way from no scaling, which leaves the range to the
// loudest direction, to whitening, under which fed back errors outgrow it. INVALID_ARGUMENT: a
// scatter without size, or no eigenvectors.
inline constexpr double kScatterDamping = 0.03;
absl::StatusOr<ScaledRotation> ScaleAndRotate(std::span<const double> scatter,
                                              std::span<const double> metric,
                                              size_t dim,
                                              const ScaleOptions& options);

// R^T M R + damping mean(diag) I, symmetric to the bit.
DoubleMatrix RotatedMetric(std::span<const double> moment,
                           std::span<const float> rotation,
                           size_t dim,
                           double damping);

// The upper Cholesky factor C, C^T C = (R^T M R + damping mean(diag) I)^-1, of query moment M under
// rotation R: what the rounding of a row's channel i adds to its channels j > i is C_ij / C_ii.
// INVALID_ARGUMENT: a moment whose trace is not positive, or that damping does not make positive
// definite: no mean of q q^T is like that.
absl::StatusOr<DoubleMatrix> FeedbackFactor(std::span<const double> moment,
                                            std::span<const float> rotation,
                                            size_t dim,
                                            double damping);

FloatMatrix ToFloat(std::span<const double> matrix);

// The largest |R R^T - I|.
double OrthogonalityError(std::span<const float> rotation, size_t dim);

}  // namespace crumb::calibrate
