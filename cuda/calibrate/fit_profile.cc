// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/fit_profile.h"

#include <algorithm>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"

#include "cuda/calibrate/rotation.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

using calibrate::DoubleMatrix;
using calibrate::FloatMatrix;

// Fewer tokens than this for each channel of a head deserve a warning: a covariance of d channels
// has about d^2 / 2 numbers. The figures of docs/design/codec.md come from 128 and more.
constexpr size_t kTokensADim = 16;

template <typename... Parts>
absl::Status Refuse(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("fit: ", parts...));
}

absl::Status CheckOptions(const Geometry& geometry, const FitOptions& options) {
  for (const auto& [name, dim] :
       {std::pair("key_dim", geometry.key_dim), std::pair("value_dim", geometry.value_dim)}) {
    if (!calibrate::IsPowerOfTwo(dim)) {
      return Refuse(name, " is ", dim, "; a Hadamard matrix needs a power of two");
    }
  }
  for (const auto& [name, ratio] :
       {std::pair("key_clip", options.key_clip), std::pair("value_clip", options.value_clip)}) {
    if (!(ratio <= 1)) {
      return Refuse(name, " is ", ratio, "; at most 1 is a ratio, and 0 turns clipping off");
    }
  }
  if (options.codec == CodecId::kOscarInt2Tilted &&
      options.key_rotation == RotationKind::kPerLayer) {
    return Refuse(
        "oscar-int2-tilted scales the keys of each KV head by their own scatter, so heads "
        "cannot share a key rotation; ask for per-head or hadamard");
  }
  if (!(options.damping > 0 && options.damping <= 1)) {
    return Refuse("damping is ", options.damping, "; it must be above 0 and at most 1");
  }
  return absl::OkStatus();
}

std::span<const double> Block(const std::vector<double>& all, size_t block, size_t size) {
  return std::span(all).subspan(block * size, size);
}

void Append(const std::vector<float>& from, std::vector<float>* to) {
  to->insert(to->end(), from.begin(), from.end());
}

// The mean over a layer's KV heads.
DoubleMatrix LayerMean(const std::vector<double>& moments,
                       const Geometry& geometry,
                       uint32_t layer,
                       size_t dim) {
  DoubleMatrix mean(dim * dim);
  for (size_t head = 0; head < geometry.num_kv_heads; ++head) {
    const auto moment = Block(moments, size_t{layer} * geometry.num_kv_heads + head, dim * dim);
    for (size_t i = 0; i < mean.size(); ++i) {
      mean[i] += moment[i] / geometry.num_kv_heads;
    }
  }
  return mean;
}

absl::Status AtHead(const absl::Status& status, const char* of, uint32_t layer, uint32_t head) {
  return status.ok() ? status
                     : Refuse(of, " of layer ", layer, ", KV head ", head, ": ", status.message());
}

// [L, H or 1, dim, dim], one a head only where they differ.
absl::StatusOr<std::vector<float>> Rotations(const char* of,
                                             RotationKind kind,
                                             const std::vector<double>& moments,
                                             const Geometry& geometry,
                                             size_t dim) {
  std::vector<float> rotations;
  const uint32_t num_heads = kind == RotationKind::kPerHead ? geometry.num_kv_heads : 1;
  for (uint32_t layer = 0; layer < geometry.num_layers; ++layer) {
    for (uint32_t head = 0; head < num_heads; ++head) {
      if (kind == RotationKind::kHadamard) {
        Append(calibrate::ToFloat(calibrate::Hadamard(dim)), &rotations);
        continue;
      }
      const auto rotation =
          kind == RotationKind::kPerLayer
              ? calibrate::OscarRotation(LayerMean(moments, geometry, layer, dim), dim)
              : calibrate::OscarRotation(
                    Block(moments, size_t{layer} * num_heads + head, dim * dim), dim);
      CRUMB_RETURN_IF_ERROR(AtHead(rotation.status(), of, layer, head));
      Append(calibrate::ToFloat(*rotation), &rotations);
    }
  }
  return rotations;
}

double Trace(std::span<const double> matrix, size_t dim) {
  double trace = 0;
  for (size_t i = 0; i < dim; ++i) {
    trace += matrix[i * dim + i];
  }
  return trace;
}

FloatMatrix Identity(size_t dim) {
  FloatMatrix identity(dim * dim);
  for (size_t i = 0; i < dim; ++i) {
    identity[i * dim + i] = 1;
  }
  return identity;
}

// The covariance of a head's keys as they are stored: about their mean if they are shifted by it.
DoubleMatrix ScatterOf(const Statistics& statistics, size_t block, bool shift_keys) {
  const size_t dim = statistics.geometry.key_dim;
  const auto moment = Block(statistics.key_moment, block, dim * dim);
  const auto mean = std::span(statistics.key_mean).subspan(block * dim, dim);
  DoubleMatrix scatter(moment.begin(), moment.end());
  for (size_t i = 0; shift_keys && i < dim; ++i) {
    for (size_t j = 0; j < dim; ++j) {
      scatter[i * dim + j] -= mean[i] * mean[j];
    }
  }
  return scatter;
}

// row * matrix, in float.
FloatMatrix RowTimes(std::span<const double> row, const DoubleMatrix& matrix) {
  FloatMatrix product;
  for (size_t column = 0; column < row.size(); ++column) {
    double sum = 0;
    for (size_t i = 0; i < row.size(); ++i) {
      sum += row[i] * matrix[i * row.size() + column];
    }
    product.push_back(static_cast<float>(sum));
  }
  return product;
}

// The keys' and the queries' transforms of oscar-int2-tilted, and the mean query in theirs.
absl::Status AddScaledRotations(const Statistics& statistics,
                                const FitOptions& options,
                                FittedProfile* fitted) {
  const Geometry& geometry = statistics.geometry;
  const size_t dim = geometry.key_dim;
  for (uint32_t layer = 0; layer < geometry.num_layers; ++layer) {
    for (uint32_t head = 0; head < geometry.num_kv_heads; ++head) {
      const size_t block = size_t{layer} * geometry.num_kv_heads + head;
      DoubleMatrix scatter = ScatterOf(statistics, block, options.shift_keys);
      if (!(Trace(scatter, dim) > 0)) {
        fitted->warnings.push_back(absl::StrCat("layer ", layer, ", KV head ", head,
                                                ": all keys were alike, so they are not scaled"));
        const FloatMatrix identity = Identity(dim);
        scatter.assign(identity.begin(), identity.end());
      }
      const auto scaled = calibrate::ScaleAndRotate(
          scatter, Block(statistics.query_moment, block, dim * dim), dim,
          /*hadamard_alone=*/options.key_rotation == RotationKind::kHadamard);
      CRUMB_RETURN_IF_ERROR(AtHead(scaled.status(), "the scaled key rotation", layer, head));
      Append(calibrate::ToFloat(scaled->keys), &fitted->parts.key_rotation);
      Append(calibrate::ToFloat(scaled->queries), &fitted->parts.query_rotation);
      Append(RowTimes(std::span(statistics.query_mean).subspan(block * dim, dim), scaled->queries),
             &fitted->parts.query_mean);
    }
  }
  return absl::OkStatus();
}

// The metric under the queries' rotation, as the feedback factor and, for oscar-int2-tilted,
// itself.
absl::Status AddFeedback(const Statistics& statistics, double damping, FittedProfile* fitted) {
  const Geometry& geometry = statistics.geometry;
  const size_t dim = geometry.key_dim;
  const bool is_tilted = fitted->parts.codec == CodecId::kOscarInt2Tilted;
  const std::vector<float>& rotations =
      is_tilted ? fitted->parts.query_rotation : fitted->parts.key_rotation;
  const bool per_head = rotations.size() == geometry.NumHeadBlocks() * dim * dim;
  for (uint32_t layer = 0; layer < geometry.num_layers; ++layer) {
    for (uint32_t head = 0; head < geometry.num_kv_heads; ++head) {
      const size_t block = size_t{layer} * geometry.num_kv_heads + head;
      const auto moment = Block(statistics.query_moment, block, dim * dim);
      if (!(Trace(moment, dim) > 0)) {
        fitted->warnings.push_back(
            absl::StrCat("layer ", layer, ", KV head ", head,
                         ": all queries were zero, so every error of its keys counts alike"));
        Append(Identity(dim), &fitted->parts.key_feedback);
        if (is_tilted) {
          Append(Identity(dim), &fitted->parts.key_metric);
        }
        continue;
      }
      const auto rotation =
          std::span(rotations).subspan((per_head ? block : layer) * dim * dim, dim * dim);
      const auto factor = calibrate::FeedbackFactor(moment, rotation, dim, damping);
      CRUMB_RETURN_IF_ERROR(AtHead(factor.status(), "the feedback factor", layer, head));
      Append(calibrate::ToFloat(*factor), &fitted->parts.key_feedback);
      if (is_tilted) {
        Append(calibrate::ToFloat(calibrate::RotatedMetric(moment, rotation, dim, damping)),
               &fitted->parts.key_metric);
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<FittedProfile> FitProfile(const Statistics& statistics, const FitOptions& options) {
  const Geometry& geometry = statistics.geometry;
  CRUMB_RETURN_IF_ERROR(CheckOptions(geometry, options));
  const bool is_aware = options.codec != CodecId::kOscarInt2;
  FittedProfile fitted;
  const size_t largest_dim = std::max(geometry.key_dim, geometry.value_dim);
  if (statistics.num_tokens < largest_dim * kTokensADim) {
    fitted.warnings.push_back(absl::StrCat("the statistics are of ", statistics.num_tokens,
                                           " tokens; below ", kTokensADim, " a channel of a head (",
                                           largest_dim * kTokensADim,
                                           ") the covariances are more noise than model"));
  }
  ProfileParts& parts = fitted.parts;
  parts.model = statistics.model;
  parts.geometry = geometry;
  parts.codec = options.codec;
  parts.windows = options.windows;
  if (options.codec == CodecId::kOscarInt2Tilted) {
    CRUMB_RETURN_IF_ERROR(AddScaledRotations(statistics, options, &fitted));
  } else {
    CRUMB_ASSIGN_OR_RETURN(parts.key_rotation,
                           Rotations("the key rotation", options.key_rotation,
                                     statistics.query_moment, geometry, geometry.key_dim));
  }
  CRUMB_ASSIGN_OR_RETURN(parts.value_rotation,
                         Rotations("the value rotation", options.value_rotation,
                                   statistics.value_covariance, geometry, geometry.value_dim));
  parts.key_clip.assign(geometry.NumHeadBlocks(), is_aware ? 0.0F : options.key_clip);
  parts.value_clip.assign(geometry.NumHeadBlocks(), options.value_clip);
  if (is_aware) {
    if (options.shift_keys) {
      parts.key_mean = calibrate::ToFloat(statistics.key_mean);
    }
    CRUMB_RETURN_IF_ERROR(AddFeedback(statistics, options.damping, &fitted));
  }
  return fitted;
}

}  // namespace crumb
