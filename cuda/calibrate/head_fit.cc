// SPDX-License-Identifier: Apache-2.0
#include "cuda/calibrate/head_fit.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "proto/base/status_macros.h"

namespace crumb::calibrate {
namespace {

double Trace(std::span<const double> matrix, size_t dim) {
  double trace = 0;
  for (size_t i = 0; i < dim; ++i) {
    trace += matrix[i * dim + i];
  }
  return trace;
}

template <typename Float>
std::vector<Float> Identity(size_t dim, Float size = 1) {
  std::vector<Float> identity(dim * dim);
  for (size_t i = 0; i < dim; ++i) {
    identity[i * dim + i] = size;
  }
  return identity;
}

// The covariance of a head's keys as they are stored: about their mean if they are shifted by it.
DoubleMatrix ScatterOf(const Statistics& statistics, size_t block, bool shift) {
  const size_t dim = statistics.geometry.key_dim;
  const auto moment = BlockOf(statistics.key_moment, block, dim * dim);
  const auto mean = BlockOf(statistics.key_mean, block, dim);
  DoubleMatrix scatter(moment.begin(), moment.end());
  for (size_t i = 0; shift && i < dim; ++i) {
    for (size_t j = 0; j < dim; ++j) {
      scatter[i * dim + j] -= mean[i] * mean[j];
    }
  }
  return scatter;
}

// row * matrix, in float.
std::vector<float> RowTimes(std::span<const double> row, const DoubleMatrix& matrix) {
  std::vector<float> product(row.size());
  for (size_t column = 0; column < row.size(); ++column) {
    double sum = 0;
    for (size_t i = 0; i < row.size(); ++i) {
      sum += row[i] * matrix[i * row.size() + column];
    }
    product[column] = static_cast<float>(sum);
  }
  return product;
}

}  // namespace

absl::StatusOr<Feedback> FitFeedback(std::span<const double> query_moment,
                                     std::span<const float> query_rotation,
                                     size_t dim,
                                     double damping) {
  if (!(Trace(query_moment, dim) > 0)) {
    return Feedback{
        .factor = Identity<float>(dim), .metric = Identity<float>(dim), .is_silent = true};
  }
  CRUMB_ASSIGN_OR_RETURN(const DoubleMatrix factor,
                         FeedbackFactor(query_moment, query_rotation, dim, damping));
  return Feedback{.factor = ToFloat(factor),
                  .metric = ToFloat(RotatedMetric(query_moment, query_rotation, dim, damping))};
}

absl::StatusOr<FittedKeys> FitKeys(const Statistics& statistics,
                                   size_t block,
                                   const KeyRecipe& recipe,
                                   std::span<const double> layer_metric) {
  const size_t dim = statistics.geometry.key_dim;
  const auto moment = BlockOf(statistics.query_moment, block, dim * dim);
  FittedKeys keys;
  keys.ranges = recipe.ranges;
  DoubleMatrix scatter = ScatterOf(statistics, block, recipe.shift);
  const bool is_flat = !(Trace(scatter, dim) > 0);
  if (is_flat) {
    keys.warnings.emplace_back("all keys were alike, so they are not scaled");
  }
  if (is_flat || !recipe.scale) {
    scatter = Identity<double>(dim);
  }
  CRUMB_ASSIGN_OR_RETURN(
      const ScaledRotation scaled,
      ScaleAndRotate(
          scatter, moment, dim,
          {.hadamard_alone = recipe.rotation == RotationKind::kHadamard,
           .guide = recipe.rotation == RotationKind::kPerLayer ? layer_metric
                                                               : std::span<const double>()}));
  keys.rotation = ToFloat(scaled.keys);
  keys.query_rotation = ToFloat(scaled.queries);
  keys.query_mean = RowTimes(BlockOf(statistics.query_mean, block, dim), scaled.queries);
  const auto mean = BlockOf(statistics.key_mean, block, dim);
  keys.mean = recipe.shift ? ToFloat(mean) : std::vector<float>(dim);
  CRUMB_ASSIGN_OR_RETURN(Feedback feedback,
                         FitFeedback(moment, keys.query_rotation, dim, recipe.damping));
  if (feedback.is_silent) {
    keys.warnings.emplace_back("all queries were zero, so every error of its keys counts alike");
  } else if (!recipe.feedback) {
    float size = 0;
    for (size_t i = 0; i < dim; ++i) {
      size += feedback.metric[i * dim + i] / static_cast<float>(dim);
    }
    feedback.metric = Identity<float>(dim, size);
    feedback.factor = Identity<float>(dim, 1 / std::sqrt(size));
  }
  keys.feedback = std::move(feedback.factor);
  keys.metric = std::move(feedback.metric);
  return keys;
}

absl::StatusOr<DoubleMatrix> ScaledMetric(const Statistics& statistics, size_t block, bool shift) {
  const size_t dim = statistics.geometry.key_dim;
  DoubleMatrix scatter = ScatterOf(statistics, block, shift);
  if (!(Trace(scatter, dim) > 0)) {
    scatter = Identity<double>(dim);
  }
  CRUMB_ASSIGN_OR_RETURN(ScaledRotation scaled,
                         ScaleAndRotate(scatter, BlockOf(statistics.query_moment, block, dim * dim),
                                        dim, {.hadamard_alone = true}));
  return std::move(scaled.metric);
}

}  // namespace crumb::calibrate
