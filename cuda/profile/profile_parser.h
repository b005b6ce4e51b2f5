// SPDX-License-Identifier: Apache-2.0
//
// From a profile file's bytes to a Profile, once. Private to the module.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "crumb/cuda/profile.h"
#include "cuda/profile/file_metadata.h"
#include "cuda/profile/safetensors.h"

namespace crumb {

class ProfileParser {
 public:
  // Called once. As Profile::Parse.
  absl::StatusOr<std::shared_ptr<const Profile>> Parse(std::vector<std::byte> file);

 private:
  absl::Status ReadMetadata();
  absl::Status ReadWindows(const MetadataReader& metadata);

  // Before any tensor is read, so that all have their place and none moves.
  void ReserveFloats();
  // The next `count` floats, on a cache line's boundary.
  float* TakeFloats(size_t count);
  // The values of a tensor, which is taken off the list of those not yet read.
  absl::StatusOr<const float*> TakeF32(const std::string& name, std::vector<uint64_t> shape);

  absl::Status ReadLayer(uint32_t layer);
  // A matrix a KV head, or one that they share: [dim, dim] or [H, dim, dim].
  absl::Status ReadMatrices(const char* name,
                            uint32_t dim,
                            uint32_t layer,
                            const float* HeadParameters::*member);
  // Those, which must be orthogonal.
  absl::Status ReadRotations(const char* name,
                             uint32_t dim,
                             uint32_t layer,
                             const float* HeadParameters::*rotation);
  absl::Status ReadKeyTransforms(uint32_t layer);
  absl::Status ReadFeedback(uint32_t layer);
  absl::Status ReadMetric(uint32_t layer);
  absl::Status ReadMeans(const char* name, const float* HeadParameters::*member);
  void ShareZeroMean();
  absl::Status ReadClip(const char* name, float HeadParameters::*member);
  // After the clip ratios.
  absl::Status ReadValueLevels();
  absl::Status CheckDeviationHasNoClip() const;
  absl::Status ReadKeyRanges();
  // "layer 1, KV head 0".
  std::string HeadName(size_t block) const;

  HeadParameters& head(uint32_t layer, uint32_t kv_head) {
    return profile_->heads_[size_t{layer} * profile_->geometry_.num_kv_heads + kv_head];
  }

  std::shared_ptr<Profile> profile_;  // shared: becomes the result.
  Safetensors contents_;              // Views into profile_->file_.
  size_t floats_taken_ = 0;
};

}  // namespace crumb
