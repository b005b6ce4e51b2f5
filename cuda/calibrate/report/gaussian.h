// SPDX-License-Identifier: Apache-2.0
//
// Rows drawn from what statistics know of a head: a mean and a covariance, hence a Gaussian.
// Immutable; Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace crumb::calibrate {

class Gaussian {
 public:
  // `second_moment` [dim, dim] is E[x x^T], symmetric; an empty `mean` is zero. What rounding made
  // negative counts as zero.
  Gaussian(std::span<const double> second_moment, std::span<const double> mean, size_t dim);

  // Of the covariance, descending.
  const std::vector<double>& eigenvalues() const { return eigenvalues_; }

  // [num_rows, dim], the same for the same seed.
  std::vector<float> Draw(size_t num_rows, uint64_t seed) const;

 private:
  size_t dim_;
  std::vector<double> mean_;
  std::vector<double> eigenvalues_;
  std::vector<float> root_;  // [dim, dim]: row i is eigenvector i times its eigenvalue's root.
};

}  // namespace crumb::calibrate
