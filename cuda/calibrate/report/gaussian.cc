// SPDX-License-Identifier: Apache-2.0
#include "cuda/calibrate/report/gaussian.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "proto/base/check.h"

#include <Eigen/Dense>
#include <Eigen/Eigenvalues>

namespace crumb::calibrate {
namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using FloatMatrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

}  // namespace

Gaussian::Gaussian(std::span<const double> second_moment, std::span<const double> mean, size_t dim)
    : dim_(dim), mean_(dim) {
  CRUMB_CHECK(second_moment.size() == dim * dim, "not a matrix of this dimension");
  CRUMB_CHECK(mean.empty() || mean.size() == dim, "not a mean of this dimension");
  std::ranges::copy(mean, mean_.begin());
  const auto size = static_cast<Eigen::Index>(dim);
  const Eigen::Map<const Eigen::VectorXd> mean_view(mean_.data(), size);
  const Matrix covariance = Eigen::Map<const Matrix>(second_moment.data(), size, size) -
                            mean_view * mean_view.transpose();
  const Eigen::SelfAdjointEigenSolver<Matrix> solver(covariance);
  for (Eigen::Index i = size; i-- > 0;) {  // Eigen's ascend.
    const double value = solver.info() == Eigen::Success ? solver.eigenvalues()(i) : 0;
    eigenvalues_.push_back(std::max(value, 0.0));
    for (Eigen::Index k = 0; k < size; ++k) {
      root_.push_back(
          static_cast<float>(std::sqrt(eigenvalues_.back()) * solver.eigenvectors()(k, i)));
    }
  }
}

std::vector<float> Gaussian::Draw(size_t num_rows, uint64_t seed) const {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  const auto rows = static_cast<Eigen::Index>(num_rows);
  const auto size = static_cast<Eigen::Index>(dim_);
  FloatMatrix noise(rows, size);
  for (float& x : std::span(noise.data(), num_rows * dim_)) {
    x = normal(random);
  }
  std::vector<float> drawn(num_rows * dim_);
  Eigen::Map<FloatMatrix> out(drawn.data(), rows, size);
  const Eigen::Map<const Eigen::RowVectorXd> mean(mean_.data(), size);
  out = noise * Eigen::Map<const FloatMatrix>(root_.data(), size, size);
  out.rowwise() += mean.cast<float>();
  return drawn;
}

}  // namespace crumb::calibrate
