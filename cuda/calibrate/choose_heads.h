// SPDX-License-Identifier: Apache-2.0
//
// Fits every head under several recipes and keeps, head by head, the one that attention on the
// reservoir's rows asks for. Thread-safe.
#pragma once

#include <vector>

#include "absl/status/statusor.h"

#include "crumb/cuda/fit_profile.h"
#include "crumb/cuda/statistics.h"
#include "cuda/calibrate/choices.h"
#include "cuda/calibrate/head_fit.h"

namespace crumb::calibrate {

struct FittedHead {
  FittedKeys keys;
  FloatMatrix value_rotation;
  float value_clip = 0;
  bool values_by_deviation = false;
};

struct ChosenHeads {
  std::vector<FittedHead> heads;  // [L, H]
  Choices choices;
};

// For oscar-int2-tilted. The default is what `options` ask for; without rows in the reservoir, or
// with options.choose off, all heads get it. Layers are fitted side by side, by
// options.num_threads. INVALID_ARGUMENT names layer and head.
absl::StatusOr<ChosenHeads> ChooseHeads(const Statistics& statistics, const FitOptions& options);

}  // namespace crumb::calibrate
