// SPDX-License-Identifier: Apache-2.0
//
// From statistics to a profile: rotations, mean keys and feedback factors.
//
// A rotation is R = U H P (OSCAR, arXiv 2605.17757): the eigenvectors of the covariance,
// eigenvalues ascending; a Hadamard matrix, which spreads each of them over all channels, so that
// the diagonal of R^T C R is constant; and a permutation that puts the channels of large and small
// eigenvalues side by side in bit-reversed order. Keys are rotated by the query moment's basis,
// since it says which directions of a key matter; values by their weighted covariance's.
// oscar-int2-tilted also scales keys by the root of their own covariance's root before they are
// rotated (see docs/design/codec.md), and queries by the inverse.
//
// All linear algebra is in double; a profile holds the result in float. Thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "crumb/cuda/profile.h"
#include "crumb/cuda/statistics.h"

namespace crumb {

enum class RotationKind : uint8_t {
  kPerHead,   // Fitted to each KV head.
  kPerLayer,  // Fitted to the mean over a layer's KV heads, which share it (as published).
  kHadamard,  // The Hadamard matrix alone, the same everywhere; needs no statistics.
};

// How a row of values is rounded.
enum class ValueLevels : uint8_t {
  kRange,      // Within its range, clipped: smaller errors, and each row a little smaller.
  kDeviation,  // By its mean and deviation (docs/decisions/0104): as large as it was.
};

// Which ranges a row of keys tries beside its whole one, under codecs with feedback. Other ones
// than the codec's are in the profile, whose pages are then demoted on the CPU alone.
enum class KeyRangeSet : uint8_t {
  kCodec,   // kKeyRanges, for all heads.
  kNarrow,  // kNarrowKeyRanges, for all heads.
  kChosen,  // Head by head these, or kWideKeyRanges, as other recipes are chosen (see `choose`).
};
inline constexpr std::array<float, 3> kNarrowKeyRanges = {0.96F, 0.92F, 0.86F};
inline constexpr std::array<float, 3> kWideKeyRanges = {0.985F, 0.965F, 0.93F};

struct FitOptions {
  CodecId codec = CodecId::kOscarInt2Tilted;
  RotationKind key_rotation = RotationKind::kPerHead;
  RotationKind value_rotation = RotationKind::kPerHead;
  Windows windows = {};
  // Under oscar-int2-aware and -tilted. Those of oscar-int2 are as published within ranges, those
  // of oscar-int2-lm by deviation.
  ValueLevels value_levels = ValueLevels::kRange;
  KeyRangeSet key_ranges = KeyRangeSet::kCodec;
  // Clip ratios, <= 0: off; the published constants. That of keys serves oscar-int2, that of values
  // what is rounded within ranges: codecs with feedback search each key's range themselves, and
  // levels by deviation need none.
  float key_clip = 0.96F;
  float value_clip = 0.92F;
  // Whether keys are shifted by their mean; not under oscar-int2.
  bool shift_keys = true;
  // Added to the diagonal of the rotated query moment, in units of its mean, before it is inverted:
  // how far the metric of a few thousand tokens is believed. At least 0.1 where there are fewer
  // tokens than channels.
  double damping = 0.01;
  // Under oscar-int2-tilted: whether a head may get another recipe than the one asked for here,
  // because attention on the statistics' reservoir loses less by it, by these shares on both halves
  // of the rows. The profile says which and why. That of keys is wide: by a tenth, the choice made
  // perplexity worse (docs/design/quality.md).
  bool choose = true;
  double key_choice_margin = 0.5;
  double value_choice_margin = 0.1;
  uint32_t num_threads = 0;  // 0: one a processor.
};

struct FittedProfile {
  ProfileParts parts;  // Its `choices` are of ChoicesText (cuda/calibrate/choices.h).
  // For people: what makes the fit doubtful (few tokens, a head whose queries were all zero).
  std::vector<std::string> warnings;
};

// INVALID_ARGUMENT: a head_dim that is not a power of two (none has such a Hadamard matrix),
// options out of range (named, with the value and the limit). Takes O(L H d^3) time: with a
// choice of recipes 14 s of two cores (bench/cuda/fit_bench.cc) for 36 layers of 8 heads at
// head_dim 128.
absl::StatusOr<FittedProfile> FitProfile(const Statistics& statistics, const FitOptions& options);

}  // namespace crumb
