// SPDX-License-Identifier: Apache-2.0
//
// A profile of rotations that others fitted: two checkpoints, and with statistics what this codec
// adds to them. Thread-safe.
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"

#include "crumb/cuda/fit_profile.h"
#include "crumb/cuda/statistics.h"
#include "cuda/checkpoint/rotation_checkpoint.h"

namespace crumb::calibrate {

// |R R^T - I| of a published rotation, each element. Those of float32 matrices made in double are
// below 1e-6; beyond this one the file was spoilt or cast to a narrower type.
inline constexpr double kImportedOrthogonality = 1e-4;

struct ImportOptions {
  std::string model = {};     // For people; empty: the statistics', or the key file's objective.
  uint32_t num_kv_heads = 0;  // Needed where neither file nor statistics know; 0: they do.
  Windows windows = {};
  // Empty: oscar-int2, or with statistics oscar-int2-aware. oscar-int2-lm needs none, and with
  // statistics also gets their mean keys.
  std::optional<CodecId> codec = std::nullopt;
  ValueLevels value_levels = ValueLevels::kRange;  // As FitOptions.
  float key_clip = 0.96F;                          // So too; oscar-int2 only.
  float value_clip = 0.92F;
  double damping = 0.01;
};

struct ImportedProfile {
  ProfileParts parts;
  std::vector<std::string> warnings;
  double key_orthogonality = 0;  // The largest |R R^T - I|.
  double value_orthogonality = 0;
};

// Without statistics a profile of oscar-int2 or oscar-int2-lm; with them of oscar-int2-aware, whose
// feedback factors and mean keys come from the statistics, for the imported rotations, or of
// oscar-int2-lm with mean keys alone.
//
// INVALID_ARGUMENT names layer, head, value, limit and remedy: files that are of different layers
// or heads, or swapped; heads that are unknown or contradicted; a rotation that is not orthogonal;
// statistics of another geometry; options out of range, a codec that the input cannot make.
absl::StatusOr<ImportedProfile> ImportProfile(const checkpoint::RotationCheckpoint& keys,
                                              const checkpoint::RotationCheckpoint& values,
                                              const std::optional<Statistics>& statistics,
                                              const ImportOptions& options);

}  // namespace crumb::calibrate
