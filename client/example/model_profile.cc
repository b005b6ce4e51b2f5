// SPDX-License-Identifier: Apache-2.0
#include "client/example/model_profile.h"

#include <cstddef>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "proto/base/status_macros.h"

namespace crumb::example {
namespace {

// [num_layers, 1, dim, dim]: one rotation a layer.
std::vector<float> IdentityRotations(uint32_t num_layers, uint32_t dim) {
  std::vector<float> rotations(size_t{num_layers} * dim * dim);
  for (size_t row = 0; row < size_t{num_layers} * dim; ++row) {
    rotations[row * dim + row % dim] = 1;
  }
  return rotations;
}

}  // namespace

// shared: as Profile::Parse returns it.
absl::StatusOr<std::shared_ptr<const Profile>> IdentityProfile(const Geometry& geometry) {
  ProfileParts parts;
  parts.model = "identity";
  parts.geometry = geometry;
  parts.codec = CodecId::kOscarInt2;
  parts.key_rotation = IdentityRotations(geometry.num_layers, geometry.key_dim);
  parts.value_rotation = IdentityRotations(geometry.num_layers, geometry.value_dim);
  parts.key_clip.assign(geometry.NumHeadBlocks(), 0.0f);
  parts.value_clip.assign(geometry.NumHeadBlocks(), 0.0f);
  CRUMB_ASSIGN_OR_RETURN(std::vector<std::byte> file, Profile::Serialize(parts));
  return Profile::Parse(std::move(file));
}

absl::Status CheckProfileFits(const Profile& profile, const Geometry& geometry) {
  if (profile.geometry() == geometry) {
    return absl::OkStatus();
  }
  const auto text = [](const Geometry& g) {
    return absl::StrCat(g.num_layers, " layers, ", g.num_kv_heads, " KV heads, head_dim ",
                        g.key_dim, " and ", g.value_dim);
  };
  return absl::FailedPreconditionError(
      absl::StrCat("the profile of ", profile.model(), " is for ", text(profile.geometry()),
                   "; the model has ", text(geometry), "; fit a profile for this model"));
}

}  // namespace crumb::example
