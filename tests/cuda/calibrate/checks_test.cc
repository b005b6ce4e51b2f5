// SPDX-License-Identifier: Apache-2.0
#include "cuda/calibrate/checks.h"

#include <gtest/gtest.h>

#include <vector>

#include "cuda/calibrate/rotation.h"

namespace crumb::calibrate {
namespace {

constexpr size_t kDim = 32;

std::vector<double> Diagonal(double first, double others) {
  std::vector<double> matrix(kDim * kDim);
  for (size_t i = 0; i < kDim; ++i) {
    matrix[i * kDim + i] = i == 0 ? first : others;
  }
  return matrix;
}

TEST(ChecksTest, AMatrixAndItsInverseTransposedHaveNoError) {
  const FloatMatrix hadamard = ToFloat(Hadamard(kDim));
  EXPECT_LT(InverseError(hadamard, hadamard, kDim), 1e-6);
  FloatMatrix scaled = hadamard;
  FloatMatrix inverse = hadamard;
  for (size_t i = 0; i < kDim * kDim; ++i) {
    scaled[i] *= 2;
    inverse[i] /= 2;
  }
  EXPECT_LT(InverseError(scaled, inverse, kDim), 1e-6);
  EXPECT_NEAR(InverseError(scaled, scaled, kDim), 3, 1e-6);
  inverse[5] += 0.5F;
  EXPECT_GT(InverseError(scaled, inverse, kDim), 0.1);
}

TEST(ChecksTest, AHadamardMatrixMakesTheDiagonalEqual) {
  const std::vector<double> moment = Diagonal(33, 1);
  EXPECT_LT(DiagonalSpread(moment, ToFloat(Hadamard(kDim)), kDim), 1e-6);
  // Unrotated, the first is 33 where the mean is 2.
  EXPECT_NEAR(DiagonalSpread(moment, ToFloat(Diagonal(1, 1)), kDim), 15.5, 1e-6);
  EXPECT_EQ(DiagonalSpread(Diagonal(0, 0), ToFloat(Hadamard(kDim)), kDim), 0);
}

TEST(ChecksTest, ASpectrumSaysHowFewDirectionsMatter) {
  const Spectrum flat = SpectrumOf(Diagonal(1, 1), kDim);
  EXPECT_NEAR(flat.largest, 1.0 / kDim, 1e-12);
  EXPECT_EQ(flat.num_for_90, 29U);  // 28.8 of 32.
  const Spectrum steep = SpectrumOf(Diagonal(969, 1), kDim);
  EXPECT_NEAR(steep.largest, 0.969, 1e-12);
  EXPECT_EQ(steep.num_for_90, 1U);
  EXPECT_EQ(SpectrumOf(Diagonal(0, 0), kDim).num_for_90, 0U);
  EXPECT_EQ(SpectrumOf(Diagonal(1, -1), kDim).num_for_90, 1U);
}

}  // namespace
}  // namespace crumb::calibrate
