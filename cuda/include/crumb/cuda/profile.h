// SPDX-License-Identifier: Apache-2.0
//
// The model profile: everything that two engines must agree on before they may share a page. One
// safetensors file, whose SHA-256 is the profile id. Immutable once made; Thread-safe.
//
// File: metadata (all strings) and tensors. L layers, H KV heads, dk and dv the head_dims.
//   metadata   format = "crumb.profile.v1", codec, model (for people), num_layers, num_kv_heads,
//              key_dim, value_dim, page_tokens (64), sink_tokens, recent_tokens; optional: choices,
//              which recipe the fit chose for each head and why, for people (see crumb-calibrate)
//   key_rotation.{layer}     F32 [dk,dk] for all heads of the layer, or [H,dk,dk]. Orthogonal; row
//   value_rotation.{layer}   F32 [dv,dv] or [H,dv,dv]            vectors: rotated = row * rotation
//   query_rotation.{layer}   as key_rotation; codec oscar-int2-tilted only, where key_rotation also
//                            scales: key_rotation * query_rotation^T is the identity
//   key_mean                 F32 [L,H,dk], optional (absent: zeros). Subtracted before rotation.
//   key_feedback.{layer}     F32 [H,dk,dk] upper triangular, positive diagonal: the Cholesky factor
//                            of the inverse metric; codecs oscar-int2-aware and -tilted only
//   key_metric.{layer}       F32 [H,dk,dk], symmetric: the metric; codec oscar-int2-tilted only
//   query_mean               F32 [L,H,dk], the mean query, rotated; codec oscar-int2-tilted only
//   key_clip, value_clip     F32 [L,H]: clip ratio, <= 0 is off, at most 1
//   value_levels             F32 [L,H], optional (absent: zeros): 0, values are rounded within
//   their
//                            clipped range; 1, by each row's mean and deviation. Not of
//                            oscar-int2-lm, which does the latter with keys and values. What is
//                            rounded so has no clip
//   key_ranges               F32 [L,H,3], optional (absent: kKeyRanges), codecs with feedback only:
//                            clip ratios, above 0 and at most 1, of the ranges that a row of keys
//                            tries beside its whole one
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "proto/base/ids.h"
#include "proto/page/geometry.h"
#include "proto/page/usable_length.h"

namespace crumb {

enum class CodecId : uint8_t {
  kOscarInt2 = 1,       // "oscar-int2": as published, every element rounded to nearest.
  kOscarInt2Aware = 2,  // "oscar-int2-aware": K rounded with error feedback and a range search.
  // "oscar-int2-tilted": so too, K scaled by its scatter and its ranges refitted for the queries
  // that attend to the row.
  kOscarInt2Tilted = 3,
  kOscarInt2Lm = 4,  // "oscar-int2-lm": rounded by each row's mean and deviation, K and V.
};
// All of them, as they are named to people: the plainest first.
inline constexpr CodecId kCodecs[] = {CodecId::kOscarInt2, CodecId::kOscarInt2Lm,
                                      CodecId::kOscarInt2Aware, CodecId::kOscarInt2Tilted};
// Whether keys are rounded with error feedback, so that a profile has key_feedback.
constexpr bool HasFeedback(CodecId codec) {
  return codec == CodecId::kOscarInt2Aware || codec == CodecId::kOscarInt2Tilted;
}
// "oscar-int2, oscar-int2-lm, oscar-int2-aware and oscar-int2-tilted", for people.
std::string CodecNames();
std::string_view CodecName(CodecId codec);
std::optional<CodecId> CodecFromName(std::string_view name);

// The clip ratios of the ranges that a row of keys tries, unless the profile has others.
inline constexpr std::array<float, 3> kKeyRanges = {0.98F, 0.95F, 0.90F};

// What the codec needs for one layer and KV head: views into the profile, alive as long as it is.
struct HeadParameters {
  uint32_t key_dim = 0;
  uint32_t value_dim = 0;
  CodecId codec = CodecId::kOscarInt2;
  const float* key_rotation = nullptr;    // [key_dim, key_dim] f32, row-major.
  const float* query_rotation = nullptr;  // The same, of queries; null: as keys.
  const float* value_rotation = nullptr;  // [value_dim, value_dim] f32, row-major.
  const float* key_mean = nullptr;        // [key_dim] f32, unrotated; never null (zeros if unused).
  const float* key_feedback = nullptr;    // [key_dim, key_dim] f32 upper triangular; null without.
  const float* key_metric = nullptr;      // [key_dim, key_dim] f32 symmetric; null unless tilted.
  const float* query_mean = nullptr;      // [key_dim] f32, rotated; null unless tilted.
  float key_clip = 0;                     // Clip ratio; <= 0: none.
  float value_clip = 0;
  bool values_by_deviation = false;  // See value_levels.
  std::array<float, 3> key_ranges = kKeyRanges;
};

// The parts of a profile, to make one from (calibration, tests). Shapes as in the file, always per
// KV head; empty key_mean, or what is of other codecs, means absent.
struct ProfileParts {
  std::string model;
  Geometry geometry;
  CodecId codec = CodecId::kOscarInt2Aware;
  Windows windows;
  std::vector<float> key_rotation;    // [L, H or 1, dk, dk]
  std::vector<float> query_rotation;  // [L, H or 1, dk, dk] or empty
  std::vector<float> value_rotation;  // [L, H or 1, dv, dv]
  std::vector<float> key_mean;        // [L, H, dk] or empty
  std::vector<float> key_feedback;    // [L, H, dk, dk] or empty
  std::vector<float> key_metric;      // [L, H, dk, dk] or empty
  std::vector<float> query_mean;      // [L, H, dk] or empty
  std::vector<float> key_clip;        // [L, H]
  std::vector<float> value_clip;      // [L, H]
  std::vector<float> value_levels;    // [L, H] or empty
  std::vector<float> key_ranges;      // [L, H, 3] or empty
  std::string choices;                // For people; empty: not in the file.
};

class Profile {
 public:
  // What travels in one message when an engine brings its profile to a daemon. The default recipe
  // takes 20 bytes a layer, KV head and element of a head's matrix: 94 MB for 36 layers of 8 heads
  // of 128, 503 MB for 48 of 8 of 256.
  static constexpr size_t kMaxFileBytes = size_t{512} << 20;

  // shared: sessions, sequences and the daemon's registry use one profile side by side.
  //
  // Reads a profile. Never trusts a length: INVALID_ARGUMENT names the tensor, its shape and what
  // was expected for a malformed, truncated, oversized or non-finite file, a rotation that is not
  // orthogonal to 1e-3 (or not inverse to the queries'), another format, codec or page size.
  // NOT_FOUND: no such file.
  static absl::StatusOr<std::shared_ptr<const Profile>> Load(const std::filesystem::path& path);
  static absl::StatusOr<std::shared_ptr<const Profile>> Parse(std::vector<std::byte> file);
  // The file that holds these parts, after the same checks. Deterministic: equal parts, equal
  // bytes.
  static absl::StatusOr<std::vector<std::byte>> Serialize(const ProfileParts& parts);

  const ProfileId& id() const { return id_; }
  const std::string& model() const { return model_; }
  const Geometry& geometry() const { return geometry_; }
  CodecId codec() const { return codec_; }
  const Windows& windows() const { return windows_; }
  // What the file says of how it was fitted, unchecked; empty: nothing.
  const std::string& choices() const { return choices_; }
  // The file's bytes, as an engine hands them to a daemon that does not know the id.
  std::span<const std::byte> file() const { return file_; }
  // layer < num_layers, kv_head < num_kv_heads.
  const HeadParameters& head(uint32_t layer, uint32_t kv_head) const {
    return heads_[size_t{layer} * geometry_.num_kv_heads + kv_head];
  }

 private:
  friend class ProfileParser;
  Profile() = default;

  ProfileId id_;
  std::string model_;
  Geometry geometry_;
  CodecId codec_ = CodecId::kOscarInt2;
  Windows windows_;
  std::string choices_;
  std::vector<std::byte> file_;
  std::vector<float> floats_;  // All tensors, aligned; heads_ points into it.
  std::vector<HeadParameters> heads_;
};

}  // namespace crumb
