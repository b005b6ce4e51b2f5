// SPDX-License-Identifier: Apache-2.0
//
// The yardstick of arithmetic: what one core of this machine reaches in a large single-precision
// matrix product. Eigen does it, compiled for several instruction sets; the fastest of those that
// the processor has is used. The widest is not always the fastest: on a Zen 4 core the product ran
// at 51e9 multiply-adds/s for AVX2, 48e9 for AVX-512, and 40e9 with GCC 12's -march=native.
#pragma once

#include <string>
#include <vector>

namespace crumb::bench {

// Thread-compatible.
class MatrixProduct {
 public:
  static constexpr int kSide = 768;  // Three matrices of 2.25 MiB: beyond L2, as pages are.

  // Tries every variant and keeps the fastest. Takes about 0.2 s.
  MatrixProduct();

  // Multiply-adds a second of this thread's time, of one product, about 10 ms long. Measure it in
  // turns with what it limits, and take the median.
  double MeasureRate();

  // "sgemm 768^3, Eigen for avx2, one thread": what Figure::limit_name wants.
  std::string name() const;

 private:
  // out = left * right, all [kSide, kSide] f32, column-major.
  using Function = void (*)(const float* left, const float* right, float* out);

  double MeasureRate(Function function);

  std::vector<float> left_;
  std::vector<float> right_;
  std::vector<float> out_;
  Function fastest_ = nullptr;
  std::string instruction_set_;
};

}  // namespace crumb::bench
