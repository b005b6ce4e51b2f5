// SPDX-License-Identifier: Apache-2.0
#include "cuda/calibrate/import_profile.h"

#include <algorithm>
#include <span>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "cuda/calibrate/head_fit.h"
#include "cuda/calibrate/rotation.h"
#include "proto/base/status_macros.h"

namespace crumb::calibrate {
namespace {

using checkpoint::RotationCheckpoint;

template <typename... Parts>
absl::Status Refuse(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("import: ", parts...));
}

CodecId CodecOf(const ImportOptions& options, bool has_statistics) {
  return options.codec.value_or(has_statistics ? CodecId::kOscarInt2Aware : CodecId::kOscarInt2);
}

absl::Status CheckOptions(const ImportOptions& options, bool has_statistics) {
  for (const auto& [name, ratio] :
       {std::pair("--key-clip", options.key_clip), std::pair("--value-clip", options.value_clip)}) {
    if (!(ratio <= 1)) {
      return Refuse(name, " is ", ratio, "; at most 1 is a ratio, and 0 turns clipping off");
    }
  }
  if (!(options.damping > 0 && options.damping <= 1)) {
    return Refuse("--damping is ", options.damping, "; it must be above 0 and at most 1");
  }
  const CodecId codec = CodecOf(options, has_statistics);
  if (codec == CodecId::kOscarInt2Tilted) {
    return Refuse(
        "--codec is oscar-int2-tilted, which scales keys before it rotates them, so rotations that "
        "others fitted do not serve it: fit one to --stats, or import as oscar-int2-aware");
  }
  if (codec == CodecId::kOscarInt2Aware && !has_statistics) {
    return Refuse(
        "--codec is oscar-int2-aware, whose feedback factors come from statistics: name them by "
        "--stats");
  }
  if (options.num_kv_heads > Geometry::kMaxKvHeads) {
    return Refuse("--kv-heads is ", options.num_kv_heads, "; at most ", Geometry::kMaxKvHeads,
                  " are possible");
  }
  return absl::OkStatus();
}

// OSCAR's objectives begin with what was fitted: qqt and ktk are of keys, sst and vtv of values.
absl::Status CheckObjectives(const RotationCheckpoint& keys, const RotationCheckpoint& values) {
  for (const auto& [is_wrong, flag, checkpoint] :
       {std::tuple(
            absl::StartsWith(keys.objective, "sst") || absl::StartsWith(keys.objective, "vtv"),
            "--k", &keys),
        std::tuple(
            absl::StartsWith(values.objective, "qqt") || absl::StartsWith(values.objective, "ktk"),
            "--v", &values)}) {
    if (is_wrong) {
      return Refuse("the objective of ", flag, "'s file is '", checkpoint->objective,
                    "', which is fitted for the other; are --k and --v swapped?");
    }
  }
  return absl::OkStatus();
}

std::string LayersText(const std::vector<uint32_t>& ids) {
  constexpr size_t kShown = 8;
  const std::span shown = std::span(ids).first(std::min(ids.size(), kShown));
  return absl::StrCat(ids.size(), " (", absl::StrJoin(shown.begin(), shown.end(), ", "),
                      ids.size() > kShown ? ", ...)" : ")");
}

// The number of KV heads, on which all that know it must agree.
absl::StatusOr<uint32_t> NumKvHeads(const RotationCheckpoint& keys,
                                    const RotationCheckpoint& values,
                                    const std::optional<Statistics>& statistics,
                                    uint32_t wished) {
  uint32_t heads = 0;
  const char* source = nullptr;
  for (const auto& [name, count] :
       {std::pair("--kv-heads", wished),
        std::pair("--stats", statistics.has_value() ? statistics->geometry.num_kv_heads : 0),
        std::pair("--k's file", keys.is_per_head ? keys.num_heads : 0),
        std::pair("--v's file", values.is_per_head ? values.num_heads : 0)}) {
    if (count == 0) {
      continue;
    }
    if (heads != 0 && heads != count) {
      return Refuse("KV heads are ", heads, " by ", source, " and ", count, " by ", name,
                    "; they must be of one model");
    }
    heads = count;
    source = name;
  }
  if (heads == 0) {
    return Refuse(
        "files of version 1 do not say how many KV heads the model has; give --kv-heads "
        "(num_key_value_heads in the model's config.json) or --stats");
  }
  return heads;
}

absl::StatusOr<Geometry> FindGeometry(const RotationCheckpoint& keys,
                                      const RotationCheckpoint& values,
                                      const std::optional<Statistics>& statistics,
                                      uint32_t num_kv_heads) {
  if (keys.layer_ids != values.layer_ids) {
    return Refuse("--k's file has layers ", LayersText(keys.layer_ids), ", --v's ",
                  LayersText(values.layer_ids), "; they must be of one model");
  }
  Geometry geometry{.num_layers = static_cast<uint32_t>(keys.layer_ids.size()),
                    .num_kv_heads = 0,
                    .key_dim = keys.dim,
                    .value_dim = values.dim};
  CRUMB_ASSIGN_OR_RETURN(geometry.num_kv_heads, NumKvHeads(keys, values, statistics, num_kv_heads));
  if (statistics.has_value() && statistics->geometry != geometry) {
    const Geometry& other = statistics->geometry;
    return Refuse("the rotations are of ", geometry.num_layers, " layers, key_dim ",
                  geometry.key_dim, ", value_dim ", geometry.value_dim, "; the statistics of ",
                  other.num_layers, ", ", other.key_dim, ", ", other.value_dim,
                  ". Collect them from the same model");
  }
  return geometry;
}

// The largest |R R^T - I|, or which rotation goes beyond the limit.
absl::StatusOr<double> CheckOrthogonal(const char* flag, const RotationCheckpoint& checkpoint) {
  const size_t matrix = size_t{checkpoint.dim} * checkpoint.dim;
  double largest = 0;
  for (size_t i = 0; i < checkpoint.rotations.size() / matrix; ++i) {
    const double error = OrthogonalityError(
        std::span(checkpoint.rotations).subspan(i * matrix, matrix), checkpoint.dim);
    if (!(error <= kImportedOrthogonality)) {
      return Refuse(
          "the rotation of ", flag, "'s layer ", checkpoint.layer_ids[i / checkpoint.num_heads],
          checkpoint.is_per_head ? absl::StrCat(", KV head ", i % checkpoint.num_heads)
                                 : std::string(),
          " is not orthogonal: |R R^T - I| is ", error, ", at most ", kImportedOrthogonality,
          " is allowed. Scores would change, so get the file "
          "as it was published");
    }
    largest = std::max(largest, error);
  }
  return largest;
}

void Append(const FloatMatrix& from, std::vector<float>* to) {
  to->insert(to->end(), from.begin(), from.end());
}

absl::Status AddFeedback(const Statistics& statistics, double damping, ImportedProfile* imported) {
  ProfileParts& parts = imported->parts;
  const Geometry& geometry = parts.geometry;
  const size_t matrix = size_t{geometry.key_dim} * geometry.key_dim;
  const bool is_per_head = parts.key_rotation.size() == geometry.NumHeadBlocks() * matrix;
  for (size_t block = 0; block < geometry.NumHeadBlocks(); ++block) {
    const size_t layer = block / geometry.num_kv_heads;
    const std::string where =
        absl::StrCat("layer ", layer, ", KV head ", block % geometry.num_kv_heads, ": ");
    const auto moment = std::span(statistics.query_moment).subspan(block * matrix, matrix);
    const auto rotation =
        std::span(parts.key_rotation).subspan((is_per_head ? block : layer) * matrix, matrix);
    const auto feedback = FitFeedback(moment, rotation, geometry.key_dim, damping);
    if (!feedback.ok()) {
      return Refuse(where, feedback.status().message());
    }
    if (feedback->is_silent) {
      imported->warnings.push_back(
          absl::StrCat(where, "all queries were zero, so every error of its keys counts alike"));
    }
    Append(feedback->factor, &parts.key_feedback);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ImportedProfile> ImportProfile(const RotationCheckpoint& keys,
                                              const RotationCheckpoint& values,
                                              const std::optional<Statistics>& statistics,
                                              const ImportOptions& options) {
  CRUMB_RETURN_IF_ERROR(CheckOptions(options, statistics.has_value()));
  CRUMB_RETURN_IF_ERROR(CheckObjectives(keys, values));
  ImportedProfile imported;
  ProfileParts& parts = imported.parts;
  CRUMB_ASSIGN_OR_RETURN(parts.geometry,
                         FindGeometry(keys, values, statistics, options.num_kv_heads));
  CRUMB_ASSIGN_OR_RETURN(imported.key_orthogonality, CheckOrthogonal("--k", keys));
  CRUMB_ASSIGN_OR_RETURN(imported.value_orthogonality, CheckOrthogonal("--v", values));
  const std::vector<uint32_t>& ids = keys.layer_ids;
  if (ids.back() != ids.size() - 1) {
    imported.warnings.push_back(absl::StrCat(
        "the files have the model's layers ", LayersText(ids), "; they are layers 0 to ",
        ids.size() - 1, " of the profile, so an engine must count layers with attention alone"));
  }
  parts.model = options.model;
  if (parts.model.empty()) {
    parts.model = statistics.has_value() ? statistics->model : keys.objective;
  }
  parts.windows = options.windows;
  parts.key_rotation = keys.rotations;
  parts.value_rotation = values.rotations;
  parts.codec = CodecOf(options, statistics.has_value());
  const size_t num_heads = parts.geometry.NumHeadBlocks();
  const bool by_deviation =
      parts.codec == CodecId::kOscarInt2Aware && options.value_levels == ValueLevels::kDeviation;
  if (by_deviation) {
    parts.value_levels.assign(num_heads, 1.0F);
  }
  parts.value_clip.assign(
      num_heads, parts.codec == CodecId::kOscarInt2Lm || by_deviation ? 0.0F : options.value_clip);
  parts.key_clip.assign(num_heads, parts.codec == CodecId::kOscarInt2 ? options.key_clip : 0.0F);
  if (statistics.has_value() && parts.codec != CodecId::kOscarInt2) {
    parts.key_mean = ToFloat(statistics->key_mean);
  }
  if (HasFeedback(parts.codec)) {
    CRUMB_RETURN_IF_ERROR(AddFeedback(*statistics, options.damping, &imported));
  }
  return imported;
}

}  // namespace crumb::calibrate
