// SPDX-License-Identifier: Apache-2.0
//
// Profiles and models: whether they fit, and a profile that changes nothing, for runs that need a
// Sequence before there is a fitted profile: collecting the statistics to fit one from, and
// baselines that keep every row in BF16.
#pragma once

#include <memory>

#include "absl/status/statusor.h"

#include "crumb/cuda/profile.h"

namespace crumb::example {

// Identity rotations, no mean, no clipping, codec oscar-int2. INVALID_ARGUMENT for a geometry that
// pages cannot have. shared: as Profile.
absl::StatusOr<std::shared_ptr<const Profile>> IdentityProfile(const Geometry& geometry);

// FAILED_PRECONDITION with both geometries unless the profile is for `geometry`.
absl::Status CheckProfileFits(const Profile& profile, const Geometry& geometry);

}  // namespace crumb::example
