// SPDX-License-Identifier: Apache-2.0
//
// Model profiles for tests and benchmarks: valid, random, not calibrated.
#pragma once

#include <cstdint>
#include <memory>

#include "crumb/cuda/profile.h"

namespace crumb {

struct TestProfileOptions {
  Geometry geometry{.num_layers = 2, .num_kv_heads = 2, .key_dim = 32, .value_dim = 32};
  Windows windows{.sink_tokens = 64, .recent_tokens = 128};
  CodecId codec = CodecId::kOscarInt2;
  uint32_t seed = 1;
  bool narrow_key_ranges = false;  // Of codecs with feedback: other ones than the codec's.
  // One rotation a layer instead of one a head: a small file for a large geometry.
  bool rotation_per_layer = false;
};

// Random orthogonal rotations, key means, and feedback factors where the codec wants them.
// Aborts when the profile does not parse.
std::shared_ptr<const Profile> MakeTestProfile(const TestProfileOptions& options = {});

}  // namespace crumb
