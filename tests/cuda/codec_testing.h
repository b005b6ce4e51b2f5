// SPDX-License-Identifier: Apache-2.0
//
// Heads, rows and blocks for the tests of the codec ops.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "crumb/cuda/cpu_path.h"
#include "crumb/cuda/profile.h"
#include "proto/base/bfloat16.h"
#include "proto/page/page_format.h"

namespace crumb {

// A head's parameters with their storage: random, plausible, not calibrated.
class TestHead {
 public:
  TestHead(uint32_t key_dim, uint32_t value_dim, CodecId codec, uint32_t seed = 1) : random_(seed) {
    const float key_deviation = 1 / std::sqrt(static_cast<float>(key_dim));
    const float value_deviation = 1 / std::sqrt(static_cast<float>(value_dim));
    key_rotation_ = Gaussian(size_t{key_dim} * key_dim, key_deviation);
    value_rotation_ = Gaussian(size_t{value_dim} * value_dim, value_deviation);
    key_mean_ = Gaussian(key_dim, 1);
    key_feedback_ = Gaussian(size_t{key_dim} * key_dim, 0.1f);
    for (size_t i = 0; i < key_dim; ++i) {
      for (size_t j = 0; j < i; ++j) {
        key_feedback_[i * key_dim + j] = 0;
      }
      key_feedback_[i * key_dim + i] = 0.5f + std::fabs(key_feedback_[i * key_dim + i]) * 5;
    }
    // A sum of squares and a diagonal, near the identity: a metric, if not that of the feedback.
    query_mean_ = Gaussian(key_dim, 0.3f);
    const auto spread = Gaussian(key_dim, 0.2f);
    key_metric_.resize(size_t{key_dim} * key_dim);
    for (size_t i = 0; i < key_dim; ++i) {
      for (size_t j = 0; j < key_dim; ++j) {
        key_metric_[i * key_dim + j] =
            query_mean_[i] * query_mean_[j] + spread[i] * spread[j] + (i == j ? 0.5f : 0.0f);
      }
    }
    const bool tilted = codec == CodecId::kOscarInt2Tilted;
    query_rotation_ = Gaussian(size_t{key_dim} * key_dim, key_deviation);
    parameters_ = {.key_dim = key_dim,
                   .value_dim = value_dim,
                   .codec = codec,
                   .key_rotation = key_rotation_.data(),
                   .query_rotation = tilted ? query_rotation_.data() : nullptr,
                   .value_rotation = value_rotation_.data(),
                   .key_mean = key_mean_.data(),
                   .key_feedback = HasFeedback(codec) ? key_feedback_.data() : nullptr,
                   .key_metric = tilted ? key_metric_.data() : nullptr,
                   .query_mean = tilted ? query_mean_.data() : nullptr,
                   .key_clip = 0.96f,
                   .value_clip = 0.92f,
                   .values_by_deviation = codec == CodecId::kOscarInt2Lm};
  }
  TestHead(const TestHead&) = delete;
  TestHead& operator=(const TestHead&) = delete;

  HeadParameters& parameters() { return parameters_; }
  std::vector<float>& key_feedback() { return key_feedback_; }
  std::vector<float>& key_metric() { return key_metric_; }
  std::vector<float>& query_mean() { return query_mean_; }

 private:
  std::vector<float> Gaussian(size_t count, float deviation) {
    std::normal_distribution<float> normal(0, deviation);
    std::vector<float> values(count);
    for (float& value : values) {
      value = normal(random_);
    }
    return values;
  }

  std::mt19937 random_;
  std::vector<float> key_rotation_;
  std::vector<float> query_rotation_;
  std::vector<float> value_rotation_;
  std::vector<float> key_mean_;
  std::vector<float> key_feedback_;
  std::vector<float> key_metric_;
  std::vector<float> query_mean_;
  HeadParameters parameters_;
};

inline std::vector<BFloat16> GaussianRows(size_t count, float deviation, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, deviation);
  std::vector<BFloat16> rows(count);
  for (BFloat16& value : rows) {
    value = BFloat16::FromFloat(normal(random));
  }
  return rows;
}

// The paths other than the twin that this machine can run.
inline std::vector<CpuPath> FastPaths() {
  std::vector<CpuPath> paths;
  for (const CpuPath path : {CpuPath::kPortable, CpuPath::kAvx2, CpuPath::kAvx512}) {
    if (CpuPathAvailable(path)) {
      paths.push_back(path);
    }
  }
  return paths;
}

}  // namespace crumb
