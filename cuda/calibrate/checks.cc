// SPDX-License-Identifier: Apache-2.0
#include "cuda/calibrate/checks.h"

#include <cmath>

#include "proto/base/check.h"

#include <Eigen/Dense>
#include <Eigen/Eigenvalues>

namespace crumb::calibrate {
namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Floats = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

Matrix ToDouble(std::span<const float> matrix, size_t dim) {
  CRUMB_CHECK(matrix.size() == dim * dim, "not a matrix of this dimension");
  const auto size = static_cast<Eigen::Index>(dim);
  return Eigen::Map<const Floats>(matrix.data(), size, size).cast<double>();
}

Eigen::Map<const Matrix> View(std::span<const double> matrix, size_t dim) {
  CRUMB_CHECK(matrix.size() == dim * dim, "not a matrix of this dimension");
  const auto size = static_cast<Eigen::Index>(dim);
  return {matrix.data(), size, size};
}

}  // namespace

double InverseError(std::span<const float> a, std::span<const float> b, size_t dim) {
  const auto size = static_cast<Eigen::Index>(dim);
  return (ToDouble(a, dim) * ToDouble(b, dim).transpose() - Matrix::Identity(size, size))
      .cwiseAbs()
      .maxCoeff();
}

double DiagonalSpread(std::span<const double> moment, std::span<const float> rotation, size_t dim) {
  const Matrix r = ToDouble(rotation, dim);
  const Matrix half = View(moment, dim) * r;
  const Eigen::VectorXd diagonal = r.cwiseProduct(half).colwise().sum();
  const double mean = diagonal.mean();
  return mean > 0 ? (diagonal.array() / mean - 1).abs().maxCoeff() : 0;
}

Spectrum SpectrumOf(std::span<const double> moment, size_t dim) {
  const Eigen::SelfAdjointEigenSolver<Matrix> solver(View(moment, dim), Eigen::EigenvaluesOnly);
  if (solver.info() != Eigen::Success) {
    return {};
  }
  const Eigen::VectorXd values = solver.eigenvalues().cwiseMax(0);  // Ascending.
  const double sum = values.sum();
  if (!(sum > 0)) {
    return {};
  }
  Spectrum spectrum{.largest = values(values.size() - 1) / sum, .num_for_90 = 0};
  for (double held = 0; held < 0.9 * sum && spectrum.num_for_90 < dim;) {
    ++spectrum.num_for_90;
    held += values(values.size() - static_cast<Eigen::Index>(spectrum.num_for_90));
  }
  return spectrum;
}

}  // namespace crumb::calibrate
