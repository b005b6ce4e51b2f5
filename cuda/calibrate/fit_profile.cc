// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/fit_profile.h"

#include <algorithm>
#include <span>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

#include "cuda/calibrate/choose_heads.h"
#include "cuda/calibrate/head_fit.h"
#include "cuda/calibrate/rotation.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

using calibrate::BlockOf;
using calibrate::DoubleMatrix;

// Fewer tokens than this for each channel of a head deserve a warning: a covariance of d channels
// has about d^2 / 2 numbers. The figures of docs/design/codec.md come from 128 and more.
constexpr size_t kTokensADim = 16;
// With fewer tokens than channels, moments are singular, and what they call nothing may be
// anything.
constexpr double kFewTokensDamping = 0.1;

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
  if (options.key_ranges == KeyRangeSet::kChosen &&
      (options.codec != CodecId::kOscarInt2Tilted || !options.choose)) {
    return Refuse(
        "key_ranges are to be chosen, which is a part of the choice of recipes under "
        "oscar-int2-tilted; ask for that, or for ranges by name");
  }
  for (const auto& [name, margin] :
       {std::pair("key_choice_margin", options.key_choice_margin),
        std::pair("value_choice_margin", options.value_choice_margin)}) {
    if (!(margin >= 0 && margin < 1)) {
      return Refuse(name, " is ", margin, "; it must be at least 0 and below 1");
    }
  }
  if (!(options.damping > 0 && options.damping <= 1)) {
    return Refuse("damping is ", options.damping, "; it must be above 0 and at most 1");
  }
  return absl::OkStatus();
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
    const auto moment = BlockOf(moments, size_t{layer} * geometry.num_kv_heads + head, dim * dim);
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
                    BlockOf(moments, size_t{layer} * num_heads + head, dim * dim), dim);
      CRUMB_RETURN_IF_ERROR(AtHead(rotation.status(), of, layer, head));
      Append(calibrate::ToFloat(*rotation), &rotations);
    }
  }
  return rotations;
}

// The metric under the keys' rotation, as the feedback factor.
absl::Status AddFeedback(const Statistics& statistics, double damping, FittedProfile* fitted) {
  const Geometry& geometry = statistics.geometry;
  const size_t dim = geometry.key_dim;
  const std::vector<float>& rotations = fitted->parts.key_rotation;
  const bool per_head = rotations.size() == geometry.NumHeadBlocks() * dim * dim;
  for (uint32_t block = 0; block < geometry.NumHeadBlocks(); ++block) {
    const uint32_t layer = block / geometry.num_kv_heads;
    const uint32_t head = block % geometry.num_kv_heads;
    const auto feedback = calibrate::FitFeedback(
        BlockOf(statistics.query_moment, block, dim * dim),
        std::span(rotations).subspan((per_head ? block : layer) * dim * dim, dim * dim), dim,
        damping);
    CRUMB_RETURN_IF_ERROR(AtHead(feedback.status(), "the feedback factor", layer, head));
    if (feedback->is_silent) {
      fitted->warnings.push_back(
          absl::StrCat("layer ", layer, ", KV head ", head,
                       ": all queries were zero, so every error of its keys counts alike"));
    }
    Append(feedback->factor, &fitted->parts.key_feedback);
  }
  return absl::OkStatus();
}

// What few tokens mean, or nothing. Below one a channel the damping grows.
std::string DistrustFewTokens(const Statistics& statistics, FitOptions* options) {
  const uint64_t tokens = statistics.num_tokens;
  const uint64_t dim = std::max(statistics.geometry.key_dim, statistics.geometry.value_dim);
  if (tokens >= dim * kTokensADim) {
    return {};
  }
  std::string warning = absl::StrCat("the statistics are of ", tokens, " tokens; below ",
                                     kTokensADim, " a channel of a head (", dim * kTokensADim,
                                     ") the covariances are more noise than model");
  if (tokens < dim) {
    options->damping = std::max(options->damping, kFewTokensDamping);
    absl::StrAppend(&warning, ", and with fewer than its ", dim,
                    " channels there are directions that no token had: damping is ",
                    options->damping,
                    ", and the profile is little better than a Hadamard matrix. Collect more text");
  }
  return warning;
}

// All that oscar-int2-tilted needs of each head, but for values that heads or layers share.
absl::Status AddTilted(const Statistics& statistics,
                       const FitOptions& options,
                       FittedProfile* fitted) {
  CRUMB_ASSIGN_OR_RETURN(const calibrate::ChosenHeads chosen,
                         calibrate::ChooseHeads(statistics, options));
  ProfileParts& parts = fitted->parts;
  bool has_own_ranges = false;
  for (size_t block = 0; block < chosen.heads.size(); ++block) {
    const calibrate::FittedHead& head = chosen.heads[block];
    for (const std::string& warning : head.keys.warnings) {
      fitted->warnings.push_back(
          absl::StrCat("layer ", block / statistics.geometry.num_kv_heads, ", KV head ",
                       block % statistics.geometry.num_kv_heads, ": ", warning));
    }
    Append(head.keys.rotation, &parts.key_rotation);
    Append(head.keys.query_rotation, &parts.query_rotation);
    Append(head.keys.feedback, &parts.key_feedback);
    Append(head.keys.metric, &parts.key_metric);
    Append(head.keys.query_mean, &parts.query_mean);
    Append(head.value_rotation, &parts.value_rotation);
    if (options.shift_keys) {
      Append(head.keys.mean, &parts.key_mean);
    }
    parts.value_clip.push_back(head.value_clip);
    parts.value_levels.push_back(head.values_by_deviation ? 1.0F : 0.0F);
    has_own_ranges |= head.keys.ranges != kKeyRanges;
    parts.key_ranges.insert(parts.key_ranges.end(), head.keys.ranges.begin(),
                            head.keys.ranges.end());
  }
  if (!has_own_ranges) {
    parts.key_ranges.clear();
  }
  if (std::ranges::all_of(parts.value_levels, [](float levels) { return levels == 0; })) {
    parts.value_levels.clear();  // As a profile without a choice has it.
  }
  parts.choices = calibrate::ChoicesText(chosen.choices);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<FittedProfile> FitProfile(const Statistics& statistics, const FitOptions& options) {
  const Geometry& geometry = statistics.geometry;
  CRUMB_RETURN_IF_ERROR(CheckOptions(geometry, options));
  FittedProfile fitted;
  FitOptions trusted = options;
  if (std::string warning = DistrustFewTokens(statistics, &trusted); !warning.empty()) {
    fitted.warnings.push_back(std::move(warning));
  }
  const bool is_published = trusted.codec == CodecId::kOscarInt2;
  ProfileParts& parts = fitted.parts;
  parts.model = statistics.model;
  parts.geometry = geometry;
  parts.codec = trusted.codec;
  parts.windows = trusted.windows;
  parts.key_clip.assign(geometry.NumHeadBlocks(), is_published ? trusted.key_clip : 0.0F);
  if (trusted.codec == CodecId::kOscarInt2Tilted) {
    CRUMB_RETURN_IF_ERROR(AddTilted(statistics, trusted, &fitted));
    return fitted;
  }
  CRUMB_ASSIGN_OR_RETURN(parts.key_rotation,
                         Rotations("the key rotation", trusted.key_rotation,
                                   statistics.query_moment, geometry, geometry.key_dim));
  CRUMB_ASSIGN_OR_RETURN(parts.value_rotation,
                         Rotations("the value rotation", trusted.value_rotation,
                                   statistics.value_covariance, geometry, geometry.value_dim));
  const bool has_feedback = HasFeedback(trusted.codec);
  const bool by_deviation = has_feedback && trusted.value_levels == ValueLevels::kDeviation;
  const bool is_clipped = is_published || (has_feedback && !by_deviation);
  parts.value_clip.assign(geometry.NumHeadBlocks(), is_clipped ? trusted.value_clip : 0.0F);
  if (by_deviation) {
    parts.value_levels.assign(geometry.NumHeadBlocks(), 1.0F);
  }
  if (!is_published && trusted.shift_keys) {
    parts.key_mean = calibrate::ToFloat(statistics.key_mean);
  }
  if (has_feedback) {
    if (trusted.key_ranges == KeyRangeSet::kNarrow) {
      for (size_t block = 0; block < geometry.NumHeadBlocks(); ++block) {
        parts.key_ranges.insert(parts.key_ranges.end(), kNarrowKeyRanges.begin(),
                                kNarrowKeyRanges.end());
      }
    }
    CRUMB_RETURN_IF_ERROR(AddFeedback(statistics, trusted.damping, &fitted));
  }
  return fitted;
}

}  // namespace crumb
