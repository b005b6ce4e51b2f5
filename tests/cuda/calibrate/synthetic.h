// SPDX-License-Identifier: Apache-2.0
//
// Attention inputs with the traits that calibration is about: queries with a steep spectrum in a
// basis of their own, keys with a mean and a few loud channels, values nearly alike in all
// directions.
#pragma once

#include <cstdint>
#include <vector>

#include "proto/page/geometry.h"

namespace crumb {

// One layer of one text.
struct SyntheticText {
  std::vector<float> queries;  // [T, Hq, dk]
  std::vector<float> keys;     // [T, H, dk]
  std::vector<float> values;   // [T, H, dv]
};

struct SyntheticModel {
  Geometry geometry;
  uint32_t num_query_heads;

  // Layers differ from each other, and texts of different seeds share a layer's spectra.
  SyntheticText Text(uint32_t layer, size_t num_tokens, uint32_t seed) const;
};

}  // namespace crumb
