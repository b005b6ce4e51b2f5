// SPDX-License-Identifier: Apache-2.0
//
// The metadata block that profiles and statistics share: its words, and reading them without trust.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "proto/page/geometry.h"

namespace crumb {

using MetadataMap = std::map<std::string, std::string>;

inline constexpr char kFormatKey[] = "format";
inline constexpr char kModelKey[] = "model";
inline constexpr char kNumLayersKey[] = "num_layers";
inline constexpr char kNumKvHeadsKey[] = "num_kv_heads";
inline constexpr char kKeyDimKey[] = "key_dim";
inline constexpr char kValueDimKey[] = "value_dim";

// One file's metadata; errors begin with `kind` ("profile", "statistics") and name the key, what it
// says and the limit. The map must outlive the reader.
class MetadataReader {
 public:
  MetadataReader(const char* kind, const MetadataMap& metadata)
      : kind_(kind), metadata_(metadata) {}

  absl::StatusOr<std::string> Text(const char* key) const;
  // Digits alone, from `min` to `max`.
  absl::StatusOr<uint64_t> Number(const char* key, uint64_t min, uint64_t max) const;

  absl::Status CheckFormat(const char* expected) const;
  absl::StatusOr<std::string> Model() const;  // At most 256 bytes.
  absl::StatusOr<Geometry> ReadGeometry() const;

 private:
  absl::StatusOr<uint32_t> HeadDim(const char* key) const;

  const char* kind_;
  const MetadataMap& metadata_;
};

// What ReadGeometry reads.
void AddGeometry(const Geometry& geometry, MetadataMap* metadata);

}  // namespace crumb
