// SPDX-License-Identifier: Apache-2.0
#include "cuda/calibrate/rotation.h"

#include <bit>
#include <cmath>

#include "proto/base/check.h"
#include "proto/base/status_macros.h"

#include <Eigen/Cholesky>
#include <Eigen/Dense>
#include <Eigen/Eigenvalues>

namespace crumb::calibrate {
namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

Eigen::Index Index(size_t value) {
  return static_cast<Eigen::Index>(value);
}

Eigen::Map<const Matrix> View(std::span<const double> matrix, size_t dim) {
  CRUMB_CHECK(matrix.size() == dim * dim, "not a matrix of this dimension");
  return {matrix.data(), Index(dim), Index(dim)};
}

Matrix FromFloat(std::span<const float> matrix, size_t dim) {
  CRUMB_CHECK(matrix.size() == dim * dim, "not a matrix of this dimension");
  using Floats = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  return Eigen::Map<const Floats>(matrix.data(), Index(dim), Index(dim)).cast<double>();
}

DoubleMatrix Flat(const Matrix& matrix) {
  return {matrix.data(), matrix.data() + matrix.size()};
}

// The bits of `value`, of which there are log2(dim), in the other order.
size_t ReverseBits(size_t value, size_t dim) {
  size_t reversed = 0;
  for (size_t bit = 1; bit < dim; bit <<= 1) {
    reversed = (reversed << 1) | ((value & bit) != 0 ? 1 : 0);
  }
  return reversed;
}

}  // namespace

DoubleMatrix Hadamard(size_t dim) {
  CRUMB_CHECK(IsPowerOfTwo(dim), "Sylvester's matrices have powers of two for dimensions");
  const double size = 1 / std::sqrt(static_cast<double>(dim));
  DoubleMatrix matrix(dim * dim);
  for (size_t row = 0; row < dim; ++row) {
    for (size_t column = 0; column < dim; ++column) {
      matrix[row * dim + column] = std::popcount(row & column) % 2 == 0 ? size : -size;
    }
  }
  return matrix;
}

absl::StatusOr<DoubleMatrix> OscarRotation(std::span<const double> covariance, size_t dim) {
  const Eigen::SelfAdjointEigenSolver<Matrix> solver(View(covariance, dim));
  if (solver.info() != Eigen::Success) {
    return absl::InvalidArgumentError("the covariance has no eigenvectors; is it too large?");
  }
  const Matrix rotated = solver.eigenvectors() * View(Hadamard(dim), dim);  // U H.
  Matrix permuted(Index(dim), Index(dim));
  for (size_t i = 0; i < dim; ++i) {
    // Eigenvalues ascend, so the i-th largest is the i-th from the end.
    permuted.col(Index(ReverseBits(i, dim))) = rotated.col(Index(dim - 1 - i));
  }
  return Flat(permuted);
}

absl::StatusOr<ScaledRotation> ScaleAndRotate(std::span<const double> scatter,
                                              std::span<const double> metric,
                                              size_t dim,
                                              const ScaleOptions& options) {
  Matrix damped = View(scatter, dim);
  damped = (damped + damped.transpose().eval()) / 2;
  const double mean = damped.diagonal().mean();
  if (!(mean > 0)) {
    return absl::InvalidArgumentError("the keys do not differ, so they have no scatter");
  }
  damped.diagonal().array() += kScatterDamping * mean;
  const Eigen::SelfAdjointEigenSolver<Matrix> solver(damped);
  if (solver.info() != Eigen::Success) {
    return absl::InvalidArgumentError("the keys' scatter has no eigenvectors; is it too large?");
  }
  // The least eigenvalue is the damping's, but for rounding.
  const Eigen::VectorXd spectrum = solver.eigenvalues().cwiseMax(1e-3 * kScatterDamping * mean);
  const auto power = [&](double exponent) -> Matrix {
    return solver.eigenvectors() * spectrum.array().pow(exponent).matrix().asDiagonal() *
           solver.eigenvectors().transpose();
  };
  const Matrix shape = power(-0.25);
  const double size = std::sqrt(mean / (shape * View(scatter, dim) * shape).diagonal().mean());
  const Matrix keys = size * shape;
  const Matrix queries = power(0.25) / size;
  Matrix seen = queries * View(metric, dim) * queries;
  seen = (seen + seen.transpose().eval()) / 2;
  DoubleMatrix rotation = Hadamard(dim);
  if (!options.hadamard_alone) {
    CRUMB_ASSIGN_OR_RETURN(rotation, options.guide.empty() ? OscarRotation(Flat(seen), dim)
                                                           : OscarRotation(options.guide, dim));
  }
  return ScaledRotation{.keys = Flat(keys * View(rotation, dim)),
                        .queries = Flat(queries * View(rotation, dim)),
                        .metric = Flat(seen)};
}

DoubleMatrix RotatedMetric(std::span<const double> moment,
                           std::span<const float> rotation,
                           size_t dim,
                           double damping) {
  const Matrix r = FromFloat(rotation, dim);
  Matrix metric = r.transpose() * View(moment, dim) * r;
  metric = (metric + metric.transpose().eval()) / 2;
  metric.diagonal().array() += damping * metric.diagonal().mean();
  return Flat(metric);
}

absl::StatusOr<DoubleMatrix> FeedbackFactor(std::span<const double> moment,
                                            std::span<const float> rotation,
                                            size_t dim,
                                            double damping) {
  const Matrix r = FromFloat(rotation, dim);
  Matrix metric = r.transpose() * View(moment, dim) * r;
  if (!(metric.trace() > 0)) {
    return absl::InvalidArgumentError("the query moment has no size, hence no inverse");
  }
  metric.diagonal().array() += damping * metric.diagonal().mean();
  const Matrix identity = Matrix::Identity(Index(dim), Index(dim));
  const Eigen::LLT<Matrix> damped(metric);
  Matrix inverse = damped.solve(identity);
  inverse = (inverse + inverse.transpose().eval()) / 2;
  const Eigen::LLT<Matrix> factor(inverse);
  if (damped.info() != Eigen::Success || factor.info() != Eigen::Success) {
    return absl::InvalidArgumentError("the query moment has negative eigenvalues beyond damping");
  }
  return Flat(factor.matrixU());
}

FloatMatrix ToFloat(std::span<const double> matrix) {
  FloatMatrix floats;
  floats.reserve(matrix.size());
  for (const double x : matrix) {
    floats.push_back(static_cast<float>(x));
  }
  return floats;
}

double OrthogonalityError(std::span<const float> rotation, size_t dim) {
  const Matrix r = FromFloat(rotation, dim);
  return (r * r.transpose() - Matrix::Identity(Index(dim), Index(dim))).cwiseAbs().maxCoeff();
}

}  // namespace crumb::calibrate
