// SPDX-License-Identifier: Apache-2.0
//
// Compiled once an instruction set. Eigen gets a namespace of its own in each: its templates would
// otherwise have the same names, and the linker would keep one set for all.
#define Eigen CRUMB_BENCH_EIGEN
#include <Eigen/Core>

extern "C" void CRUMB_BENCH_SGEMM(const float* left, const float* right, float* out);

extern "C" void CRUMB_BENCH_SGEMM(const float* left, const float* right, float* out) {
  constexpr int kSide = 768;  // MatrixProduct::kSide; no header of ours is compiled for this set.
  Eigen::Map<Eigen::MatrixXf>(out, kSide, kSide).noalias() =
      Eigen::Map<const Eigen::MatrixXf>(left, kSide, kSide) *
      Eigen::Map<const Eigen::MatrixXf>(right, kSide, kSide);
}
