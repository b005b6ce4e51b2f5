// SPDX-License-Identifier: Apache-2.0
//
// shared: a profile is held by all engines, pages and tasks that use it.
#include "crumb/cuda/profile.h"

#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"

#include "cuda/profile/file_metadata.h"
#include "cuda/profile/profile_file.h"
#include "cuda/profile/safetensors.h"
#include "proto/base/check.h"
#include "proto/base/file.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

// One [extents...] piece of a flat array, as a tensor of its own.
Tensor Slice(std::span<const float> floats, size_t index, std::vector<uint64_t> shape) {
  size_t count = 1;
  for (const uint64_t extent : shape) {
    count *= extent;
  }
  return {.type = TensorType::kF32,
          .shape = std::move(shape),
          .data = std::as_bytes(floats.subspan(index * count, count))};
}

absl::Status CheckSize(const char* name, size_t size, size_t expected, bool may_be_empty = false) {
  if (size == expected || (may_be_empty && size == 0)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("profile parts: ", name, " has ", size,
                                                 " floats; its geometry asks for ", expected));
}

// Adds `name`.{layer} for each layer, [dim, dim] if the heads share it and else [H, dim, dim].
absl::Status AddRotations(const char* name,
                          const Geometry& geometry,
                          uint32_t dim,
                          const std::vector<float>& floats,
                          Safetensors* file) {
  const size_t per_layer = size_t{geometry.num_layers} * dim * dim;
  const bool is_shared = floats.size() == per_layer;
  if (!is_shared) {
    CRUMB_RETURN_IF_ERROR(CheckSize(name, floats.size(), per_layer * geometry.num_kv_heads));
  }
  for (uint32_t layer = 0; layer < geometry.num_layers; ++layer) {
    const std::vector<uint64_t> shape =
        is_shared ? std::vector<uint64_t>{dim, dim}
                  : std::vector<uint64_t>{geometry.num_kv_heads, dim, dim};
    file->tensors[profile_file::LayerTensor(name, layer)] = Slice(floats, layer, shape);
  }
  return absl::OkStatus();
}

MetadataMap MetadataOf(const ProfileParts& parts) {
  MetadataMap metadata = {
      {kFormatKey, profile_file::kFormat},
      {kModelKey, parts.model},
      {profile_file::kCodecKey, std::string(CodecName(parts.codec))},
      {profile_file::kPageTokensKey, absl::StrCat(kPageTokens)},
      {profile_file::kSinkTokensKey, absl::StrCat(parts.windows.sink_tokens)},
      {profile_file::kRecentTokensKey, absl::StrCat(parts.windows.recent_tokens)},
  };
  if (!parts.choices.empty()) {
    metadata[profile_file::kChoicesKey] = parts.choices;
  }
  AddGeometry(parts.geometry, &metadata);
  return metadata;
}

}  // namespace

std::string_view CodecName(CodecId codec) {
  switch (codec) {
    case CodecId::kOscarInt2:
      return "oscar-int2";
    case CodecId::kOscarInt2Aware:
      return "oscar-int2-aware";
    case CodecId::kOscarInt2Tilted:
      return "oscar-int2-tilted";
    case CodecId::kOscarInt2Lm:
      return "oscar-int2-lm";
  }
  CRUMB_CHECK(false, "not a codec");
}

std::optional<CodecId> CodecFromName(std::string_view name) {
  for (const CodecId codec : kCodecs) {
    if (CodecName(codec) == name) {
      return codec;
    }
  }
  return std::nullopt;
}

std::string CodecNames() {
  std::string names;
  for (size_t i = 0; i < std::size(kCodecs); ++i) {
    absl::StrAppend(&names,
                    i == 0                       ? ""
                    : i + 1 < std::size(kCodecs) ? ", "
                                                 : " and ",
                    std::string(CodecName(kCodecs[i])));
  }
  return names;
}

absl::StatusOr<std::shared_ptr<const Profile>> Profile::Load(const std::filesystem::path& path) {
  CRUMB_ASSIGN_OR_RETURN(std::vector<std::byte> file, ReadFile(path, kMaxFileBytes));
  auto profile = Parse(std::move(file));
  if (!profile.ok()) {
    return absl::Status(profile.status().code(),
                        absl::StrCat(path.string(), ": ", profile.status().message()));
  }
  return profile;
}

absl::StatusOr<std::vector<std::byte>> Profile::Serialize(const ProfileParts& parts) {
  const Geometry& geometry = parts.geometry;
  if (!geometry.IsValid()) {
    return absl::InvalidArgumentError("profile parts: the geometry is not valid");
  }
  const uint64_t layers = geometry.num_layers;
  const uint64_t heads = geometry.num_kv_heads;
  const uint64_t dim = geometry.key_dim;
  Safetensors file;
  file.metadata = MetadataOf(parts);
  CRUMB_RETURN_IF_ERROR(AddRotations(profile_file::kKeyRotation, geometry, geometry.key_dim,
                                     parts.key_rotation, &file));
  if (!parts.query_rotation.empty()) {
    CRUMB_RETURN_IF_ERROR(AddRotations(profile_file::kQueryRotation, geometry, geometry.key_dim,
                                       parts.query_rotation, &file));
  }
  CRUMB_RETURN_IF_ERROR(AddRotations(profile_file::kValueRotation, geometry, geometry.value_dim,
                                     parts.value_rotation, &file));
  for (const auto& [name, floats] : {std::pair(profile_file::kKeyMean, &parts.key_mean),
                                     std::pair(profile_file::kQueryMean, &parts.query_mean)}) {
    CRUMB_RETURN_IF_ERROR(
        CheckSize(name, floats->size(), layers * heads * dim, /*may_be_empty=*/true));
    if (!floats->empty()) {
      file.tensors[name] = Slice(*floats, 0, {layers, heads, dim});
    }
  }
  for (const auto& [name, floats] : {std::pair(profile_file::kKeyFeedback, &parts.key_feedback),
                                     std::pair(profile_file::kKeyMetric, &parts.key_metric)}) {
    CRUMB_RETURN_IF_ERROR(
        CheckSize(name, floats->size(), layers * heads * dim * dim, /*may_be_empty=*/true));
    for (uint32_t layer = 0; layer < layers && !floats->empty(); ++layer) {
      file.tensors[profile_file::LayerTensor(name, layer)] =
          Slice(*floats, layer, {heads, dim, dim});
    }
  }
  CRUMB_RETURN_IF_ERROR(CheckSize(profile_file::kKeyClip, parts.key_clip.size(), layers * heads));
  CRUMB_RETURN_IF_ERROR(
      CheckSize(profile_file::kValueClip, parts.value_clip.size(), layers * heads));
  CRUMB_RETURN_IF_ERROR(CheckSize(profile_file::kKeyRanges, parts.key_ranges.size(),
                                  layers * heads * kKeyRanges.size(), /*may_be_empty=*/true));
  if (!parts.key_ranges.empty()) {
    file.tensors[profile_file::kKeyRanges] =
        Slice(parts.key_ranges, 0, {layers, heads, kKeyRanges.size()});
  }
  CRUMB_RETURN_IF_ERROR(CheckSize(profile_file::kValueLevels, parts.value_levels.size(),
                                  layers * heads, /*may_be_empty=*/true));
  if (!parts.value_levels.empty()) {
    file.tensors[profile_file::kValueLevels] = Slice(parts.value_levels, 0, {layers, heads});
  }
  file.tensors[profile_file::kKeyClip] = Slice(parts.key_clip, 0, {layers, heads});
  file.tensors[profile_file::kValueClip] = Slice(parts.value_clip, 0, {layers, heads});

  std::vector<std::byte> bytes = SerializeSafetensors(file);
  // The reader's checks are the checks; there is no second list of them here.
  CRUMB_RETURN_IF_ERROR(Parse(bytes).status());
  return bytes;
}

}  // namespace crumb
