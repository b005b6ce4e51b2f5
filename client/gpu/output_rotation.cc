// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/output_rotation.h"

#include <vector>

namespace crumb {

absl::StatusOr<std::unique_ptr<DeviceProfile>> CreateOutputProfile(
    const Geometry& geometry, std::span<const HeadParameters> heads) {
  const size_t dim = geometry.value_dim;
  std::vector<float> transposed(heads.size() * dim * dim);
  const std::vector<float> no_mean(geometry.key_dim);
  std::vector<HeadParameters> outputs;
  outputs.reserve(heads.size());
  for (size_t i = 0; i < heads.size(); ++i) {
    float* const matrix = transposed.data() + i * dim * dim;
    for (size_t row = 0; row < dim; ++row) {
      for (size_t column = 0; column < dim; ++column) {
        matrix[row * dim + column] = heads[i].value_rotation[column * dim + row];
      }
    }
    // V's own rotation is not used: only queries are rotated.
    outputs.push_back({.key_dim = heads[i].key_dim,
                       .value_dim = heads[i].value_dim,
                       .codec = CodecId::kOscarInt2,
                       .key_rotation = matrix,
                       .value_rotation = heads[i].value_rotation,
                       .key_mean = no_mean.data()});
  }
  return DeviceProfile::Create(geometry, outputs);
}

}  // namespace crumb
