// SPDX-License-Identifier: Apache-2.0
//
// How outputs of attention, means of rotated values, are brought back to the model's coordinates:
// by append_rows, as queries of a profile whose rotation is that of values, transposed.
#pragma once

#include <memory>
#include <span>

#include "absl/status/statusor.h"

#include "crumb/cuda/device_profile.h"

namespace crumb {

// `heads` [num_layers, num_kv_heads] of the geometry. Errors as DeviceProfile::Create.
absl::StatusOr<std::unique_ptr<DeviceProfile>> CreateOutputProfile(
    const Geometry& geometry, std::span<const HeadParameters> heads);

}  // namespace crumb
