// SPDX-License-Identifier: Apache-2.0
#include "cuda/profile/file_metadata.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

#include "cuda/profile/safetensors.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

constexpr size_t kMaxModelBytes = 256;

}  // namespace

absl::StatusOr<std::string> MetadataReader::Text(const char* key) const {
  const auto found = metadata_.find(key);
  if (found == metadata_.end()) {
    return absl::InvalidArgumentError(absl::StrCat(kind_, ": metadata '", key, "' is missing"));
  }
  return found->second;
}

absl::StatusOr<uint64_t> MetadataReader::Number(const char* key, uint64_t min, uint64_t max) const {
  CRUMB_ASSIGN_OR_RETURN(const std::string text, Text(key));
  uint64_t number = 0;
  // Digits alone: SimpleAtoi would also take a sign and blanks.
  if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos ||
      !absl::SimpleAtoi(text, &number)) {
    return absl::InvalidArgumentError(absl::StrCat(kind_, ": metadata '", key, "' is '",
                                                   Printable(text), "', not a whole number"));
  }
  if (number < min || number > max) {
    return absl::InvalidArgumentError(absl::StrCat(kind_, ": metadata '", key, "' is ", number,
                                                   "; it must be from ", min, " to ", max));
  }
  return number;
}

absl::Status MetadataReader::CheckFormat(const char* expected) const {
  CRUMB_ASSIGN_OR_RETURN(const std::string format, Text(kFormatKey));
  if (format != expected) {
    return absl::InvalidArgumentError(absl::StrCat(kind_, ": metadata 'format' is '",
                                                   Printable(format), "'; this version reads '",
                                                   expected, "' alone"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> MetadataReader::Model() const {
  CRUMB_ASSIGN_OR_RETURN(std::string model, Text(kModelKey));
  if (model.size() > kMaxModelBytes) {
    return absl::InvalidArgumentError(absl::StrCat(kind_, ": metadata 'model' has ", model.size(),
                                                   " bytes; at most ", kMaxModelBytes,
                                                   " are allowed"));
  }
  return model;
}

absl::StatusOr<uint32_t> MetadataReader::HeadDim(const char* key) const {
  CRUMB_ASSIGN_OR_RETURN(const uint64_t dim, Number(key, 1, kMaxHeadDim));
  if (!IsValidHeadDim(static_cast<uint32_t>(dim))) {
    return absl::InvalidArgumentError(absl::StrCat(kind_, ": metadata '", key, "' is ", dim,
                                                   "; it must be a multiple of 32 from 32 to ",
                                                   kMaxHeadDim));
  }
  return static_cast<uint32_t>(dim);
}

absl::StatusOr<Geometry> MetadataReader::ReadGeometry() const {
  Geometry geometry;
  CRUMB_ASSIGN_OR_RETURN(const uint64_t layers, Number(kNumLayersKey, 1, Geometry::kMaxLayers));
  CRUMB_ASSIGN_OR_RETURN(const uint64_t heads, Number(kNumKvHeadsKey, 1, Geometry::kMaxKvHeads));
  geometry.num_layers = static_cast<uint32_t>(layers);
  geometry.num_kv_heads = static_cast<uint32_t>(heads);
  CRUMB_ASSIGN_OR_RETURN(geometry.key_dim, HeadDim(kKeyDimKey));
  CRUMB_ASSIGN_OR_RETURN(geometry.value_dim, HeadDim(kValueDimKey));
  CRUMB_CHECK(geometry.IsValid(), "the checks above are Geometry's");
  return geometry;
}

void AddGeometry(const Geometry& geometry, MetadataMap* metadata) {
  (*metadata)[kNumLayersKey] = absl::StrCat(geometry.num_layers);
  (*metadata)[kNumKvHeadsKey] = absl::StrCat(geometry.num_kv_heads);
  (*metadata)[kKeyDimKey] = absl::StrCat(geometry.key_dim);
  (*metadata)[kValueDimKey] = absl::StrCat(geometry.value_dim);
}

}  // namespace crumb
