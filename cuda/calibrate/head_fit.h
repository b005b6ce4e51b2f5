// SPDX-License-Identifier: Apache-2.0
//
// Fits one KV head: a recipe and the head's moments give the matrices that a profile holds for it.
// Thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "crumb/cuda/fit_profile.h"
#include "crumb/cuda/statistics.h"
#include "cuda/calibrate/rotation.h"

namespace crumb::calibrate {

// One head's part of a moment [L, H, size].
inline std::span<const double> BlockOf(const std::vector<double>& all, size_t block, size_t size) {
  return std::span(all).subspan(block * size, size);
}

// The query moment as what rounding needs of it, under the rotation of queries.
struct Feedback {
  FloatMatrix factor;      // See FeedbackFactor.
  FloatMatrix metric;      // See RotatedMetric.
  bool is_silent = false;  // No query had any size, so every error counts alike.
};
// INVALID_ARGUMENT as FeedbackFactor.
absl::StatusOr<Feedback> FitFeedback(std::span<const double> query_moment,
                                     std::span<const float> query_rotation,
                                     size_t dim,
                                     double damping);

// How one head's keys are stored under oscar-int2-tilted.
struct KeyRecipe {
  RotationKind rotation = RotationKind::kPerHead;
  bool scale = true;     // By their scatter.
  bool shift = true;     // By their mean.
  bool feedback = true;  // Else every error counts alike, but for those along a row's readers.
  double damping = 0.01;
  std::array<float, 3> ranges = kKeyRanges;
};

struct FittedKeys {
  FloatMatrix rotation;
  FloatMatrix query_rotation;
  FloatMatrix feedback;
  FloatMatrix metric;
  std::vector<float> mean;
  std::vector<float> query_mean;
  std::array<float, 3> ranges = kKeyRanges;
  std::vector<std::string> warnings;  // Without the head's name.
};

// `layer_metric`: the mean over a layer's heads of ScaledMetric, for RotationKind::kPerLayer alone.
absl::StatusOr<FittedKeys> FitKeys(const Statistics& statistics,
                                   size_t block,
                                   const KeyRecipe& recipe,
                                   std::span<const double> layer_metric = {});

// The query moment as a head's scaled keys see it.
absl::StatusOr<DoubleMatrix> ScaledMetric(const Statistics& statistics, size_t block, bool shift);

}  // namespace crumb::calibrate
