// SPDX-License-Identifier: Apache-2.0
#include "cuda/calibrate/rotation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>

#include <Eigen/Dense>

namespace crumb::calibrate {
namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

Matrix View(const DoubleMatrix& matrix) {
  const auto dim = static_cast<Eigen::Index>(std::lround(std::sqrt(matrix.size())));
  return Eigen::Map<const Matrix>(matrix.data(), dim, dim);
}

DoubleMatrix Flat(const Matrix& matrix) {
  return {matrix.data(), matrix.data() + matrix.size()};
}

// Of a condition number like that of real queries: about 1000.
Matrix RandomMoment(size_t dim, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  const auto n = static_cast<Eigen::Index>(dim);
  Matrix rows(4 * n, n);
  for (Eigen::Index i = 0; i < rows.size(); ++i) {
    const auto column = static_cast<double>(i % n);
    rows.data()[i] = normal(random) * std::pow(10.0, -1.5 * column / static_cast<double>(n));
  }
  return rows.transpose() * rows / static_cast<double>(rows.rows());
}

double LargestDifference(const Matrix& a, const Matrix& b) {
  return (a - b).cwiseAbs().maxCoeff();
}

class RotationTest : public testing::TestWithParam<size_t> {
 protected:
  size_t dim() const { return GetParam(); }
  Matrix Identity() const {
    const auto n = static_cast<Eigen::Index>(dim());
    return Matrix::Identity(n, n);
  }
};

TEST_P(RotationTest, HadamardIsOrthogonalWithElementsOfOneSize) {
  const Matrix h = View(Hadamard(dim()));
  EXPECT_LT(LargestDifference(h * h.transpose(), Identity()), 1e-12);
  const double size = 1 / std::sqrt(static_cast<double>(dim()));
  EXPECT_LT((h.cwiseAbs().array() - size).abs().maxCoeff(), 1e-15);
}

TEST_P(RotationTest, HadamardGrowsByItsOwnCopies) {
  const Matrix h = View(Hadamard(dim()));
  const Matrix half = View(Hadamard(dim() / 2)) / std::sqrt(2.0);
  const auto n = half.rows();
  EXPECT_LT(LargestDifference(h.topLeftCorner(n, n), half), 1e-15);
  EXPECT_LT(LargestDifference(h.topRightCorner(n, n), half), 1e-15);
  EXPECT_LT(LargestDifference(h.bottomLeftCorner(n, n), half), 1e-15);
  EXPECT_LT(LargestDifference(h.bottomRightCorner(n, n), -half), 1e-15);
}

TEST_P(RotationTest, OscarIsOrthogonalInFloat) {
  const auto rotation = OscarRotation(Flat(RandomMoment(dim(), 1)), dim());
  ASSERT_TRUE(rotation.ok());
  EXPECT_LT(LargestDifference(View(*rotation).transpose() * View(*rotation), Identity()), 1e-12);
  EXPECT_LT(OrthogonalityError(ToFloat(*rotation), dim()), 1e-6);
}

// What the rotation is for: each channel carries the same share of what attention sees.
TEST_P(RotationTest, OscarSpreadsTheCovarianceEvenly) {
  const Matrix moment = RandomMoment(dim(), 2);
  const auto rotation = OscarRotation(Flat(moment), dim());
  ASSERT_TRUE(rotation.ok());
  const Matrix rotated = View(*rotation).transpose() * moment * View(*rotation);
  const double share = moment.trace() / static_cast<double>(dim());
  EXPECT_LT((rotated.diagonal().array() - share).abs().maxCoeff(), 1e-12 * share * 1000);
  // Without it the shares differ widely, or this test would say nothing.
  EXPECT_GT((moment.diagonal().array() - share).abs().maxCoeff(), share);
}

// The definition, written out: U H P with P = I[:, perm], perm[bitrev(i)] =
// argsort_desc(values)[i].
TEST_P(RotationTest, OscarIsEigenvectorsTimesHadamardInBitReversedOrder) {
  const Matrix moment = RandomMoment(dim(), 3);
  const Eigen::SelfAdjointEigenSolver<Matrix> solver(moment);
  size_t bits = 0;
  while ((size_t{1} << bits) < dim()) {
    ++bits;
  }
  Matrix p = Matrix::Zero(moment.rows(), moment.cols());
  for (size_t i = 0; i < dim(); ++i) {
    std::string binary;
    for (size_t bit = bits; bit-- > 0;) {
      binary.push_back(((i >> bit) & 1) != 0 ? '1' : '0');
    }
    std::reverse(binary.begin(), binary.end());
    const size_t reversed = std::stoul(binary, nullptr, 2);
    p(static_cast<Eigen::Index>(dim() - 1 - i), static_cast<Eigen::Index>(reversed)) = 1;
  }
  const Matrix expected = solver.eigenvectors() * View(Hadamard(dim())) * p;
  const auto rotation = OscarRotation(Flat(moment), dim());
  ASSERT_TRUE(rotation.ok());
  EXPECT_LT(LargestDifference(View(*rotation), expected), 1e-10);
}

TEST_P(RotationTest, FeedbackFactorReproducesTheInverseOfTheDampedMetric) {
  const Matrix moment = RandomMoment(dim(), 4);
  const auto oscar = OscarRotation(Flat(moment), dim());
  ASSERT_TRUE(oscar.ok());
  const FloatMatrix rotation = ToFloat(*oscar);
  const auto factor = FeedbackFactor(Flat(moment), rotation, dim(), 0.01);
  ASSERT_TRUE(factor.ok()) << factor.status();
  const Matrix c = View(*factor);
  EXPECT_EQ(Matrix(c.triangularView<Eigen::StrictlyLower>()).cwiseAbs().maxCoeff(), 0);
  EXPECT_GT(c.diagonal().minCoeff(), 0);

  Matrix r = View(*oscar);
  for (Eigen::Index i = 0; i < r.size(); ++i) {
    r.data()[i] = rotation[static_cast<size_t>(i)];  // As the codec will use it.
  }
  const Matrix metric =
      r.transpose() * moment * r + 0.01 * moment.trace() / static_cast<double>(dim()) * Identity();
  EXPECT_LT(LargestDifference(c.transpose() * c * metric, Identity()), 1e-8);
}

INSTANTIATE_TEST_SUITE_P(Dims, RotationTest, testing::Values(32, 64, 128, 256));

TEST(RotationErrorTest, MetricsThatNoQueriesHaveAreRefused) {
  const size_t dim = 32;
  const FloatMatrix rotation = ToFloat(Hadamard(dim));
  const auto message = [&](const Matrix& moment) {
    return std::string(FeedbackFactor(Flat(moment), rotation, dim, 0.01).status().message());
  };
  EXPECT_THAT(message(Matrix::Zero(dim, dim)), testing::HasSubstr("no size"));
  Matrix indefinite = Matrix::Identity(dim, dim);
  indefinite(0, 1) = indefinite(1, 0) = 5;
  EXPECT_THAT(message(indefinite), testing::HasSubstr("negative eigenvalues"));
}

TEST(RotationErrorTest, ErrorOfAMatrixThatIsNotOrthogonalIsItsSize) {
  FloatMatrix matrix = ToFloat(Hadamard(32));
  EXPECT_LT(OrthogonalityError(matrix, 32), 1e-6);
  for (size_t column = 0; column < 32; ++column) {
    matrix[5 * 32 + column] *= 2;
  }
  EXPECT_NEAR(OrthogonalityError(matrix, 32), 3, 1e-5);
}

}  // namespace
}  // namespace crumb::calibrate
