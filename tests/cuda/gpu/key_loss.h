// SPDX-License-Identifier: Apache-2.0
//
// What rounding costs the keys of a head block, in double, by the codec's own measure.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "crumb/cuda/profile.h"
#include "proto/base/bfloat16.h"
#include "proto/base/float16.h"
#include "proto/page/page_format.h"

namespace crumb {

inline float Half(const std::byte* at) {
  uint16_t bits;
  std::memcpy(&bits, at, sizeof(bits));
  return Float16{bits}.ToFloat();
}

// Row `token` of K as a head block has it.
inline std::vector<float> KeyRow(const std::byte* block, uint32_t token, uint32_t dim) {
  const Int2HeadBlock format{dim, dim};
  const float scale = Half(block + format.KeyMetaByte(token));
  const float min = Half(block + format.KeyMetaByte(token) + 2);
  std::vector<float> row(dim);
  for (uint32_t i = 0; i < dim; ++i) {
    const CodePosition at = format.KeyCode(token, i);
    const auto code = (std::to_integer<uint32_t>(block[at.byte]) >> at.shift) & 3u;
    row[i] = static_cast<float>(code) * scale + min;
  }
  return row;
}

// The square of a row's error in the metric of its head: the sum of e^2, where the error of a
// channel counts after what the errors before it have pushed into it.
inline double SquareInMetric(const HeadParameters& head,
                             const BFloat16* row,
                             const std::vector<float>& rounded) {
  const uint32_t dim = head.key_dim;
  double square = 0;
  std::vector<double> open(dim);
  for (uint32_t i = 0; i < dim; ++i) {
    open[i] = double{row[i].ToFloat()};
  }
  for (uint32_t i = 0; i < dim; ++i) {
    const float* weights = head.key_feedback + size_t{i} * dim;
    const double error = (open[i] - double{rounded[i]}) / double{weights[i]};
    square += error * error;
    for (uint32_t j = i + 1; j < dim; ++j) {
      open[j] -= error * double{weights[j]};
    }
  }
  return square;
}

// A row's error as a score of the mean query of those that attend to the row.
inline double ErrorForReaders(const HeadParameters& head,
                              const BFloat16* row,
                              const std::vector<float>& rounded) {
  const uint32_t dim = head.key_dim;
  double mean_score = 0;
  for (uint32_t i = 0; i < dim; ++i) {
    mean_score += double{head.query_mean[i]} * double{row[i].ToFloat()};
  }
  double error = 0;
  for (uint32_t j = 0; j < dim; ++j) {
    double tilt = -mean_score * double{head.query_mean[j]};
    for (uint32_t i = 0; i < dim; ++i) {
      tilt += double{row[i].ToFloat()} * double{head.key_metric[size_t{i} * dim + j]};
    }
    tilt = double{head.query_mean[j]} + tilt / std::sqrt(static_cast<double>(dim));
    error += tilt * (double{row[j].ToFloat()} - double{rounded[j]});
  }
  return error;
}

// The loss of K's rounding, as the codec's own measure of it.
inline double KeyLoss(const HeadParameters& head, const std::byte* block, const BFloat16* keys) {
  const uint32_t dim = head.key_dim;
  double loss = 0;
  for (uint32_t token = 0; token < kPageTokens; ++token) {
    const BFloat16* row = keys + size_t{token} * dim;
    const std::vector<float> rounded = KeyRow(block, token, dim);
    loss += SquareInMetric(head, row, rounded);
    if (head.codec == CodecId::kOscarInt2Tilted) {
      loss += std::pow(ErrorForReaders(head, row, rounded), 2);
    }
  }
  return loss;
}

}  // namespace crumb
