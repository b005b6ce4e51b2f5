// SPDX-License-Identifier: Apache-2.0
//
// shared: a profile is held by all engines, pages and tasks that use it.
#include "cuda/profile/profile_parser.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "cuda/profile/file_metadata.h"
#include "cuda/profile/matrix_checks.h"
#include "cuda/profile/profile_file.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"
#include "proto/page/namespace_id.h"

namespace crumb {
namespace {

constexpr size_t kLineFloats = 16;  // Of a cache line.
constexpr uint32_t kMaxWindowTokens = 1 << 20;

template <typename... Parts>
absl::Status Refuse(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("profile: ", parts...));
}

size_t RoundUpToLine(size_t count) {
  return (count + kLineFloats - 1) / kLineFloats * kLineFloats;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Profile>> Profile::Parse(std::vector<std::byte> file) {
  return ProfileParser().Parse(std::move(file));
}

absl::StatusOr<std::shared_ptr<const Profile>> ProfileParser::Parse(std::vector<std::byte> file) {
  if (file.size() > Profile::kMaxFileBytes) {
    return Refuse("the file has ", file.size(), " bytes; at most ", Profile::kMaxFileBytes,
                  " are allowed: fit it with a rotation a layer, or by a codec of fewer matrices");
  }
  profile_.reset(new Profile);
  profile_->file_ = std::move(file);
  CRUMB_ASSIGN_OR_RETURN(contents_, ParseSafetensors(profile_->file_));
  CRUMB_RETURN_IF_ERROR(ReadMetadata());

  const Geometry& geometry = profile_->geometry_;
  profile_->heads_.assign(
      geometry.NumHeadBlocks(),
      {.key_dim = geometry.key_dim, .value_dim = geometry.value_dim, .codec = profile_->codec_});
  ReserveFloats();
  for (uint32_t layer = 0; layer < geometry.num_layers; ++layer) {
    CRUMB_RETURN_IF_ERROR(ReadLayer(layer));
  }
  if (contents_.tensors.contains(profile_file::kKeyMean)) {
    CRUMB_RETURN_IF_ERROR(ReadMeans(profile_file::kKeyMean, &HeadParameters::key_mean));
  } else {
    ShareZeroMean();
  }
  if (profile_->codec_ == CodecId::kOscarInt2Tilted) {
    CRUMB_RETURN_IF_ERROR(ReadMeans(profile_file::kQueryMean, &HeadParameters::query_mean));
  }
  CRUMB_RETURN_IF_ERROR(ReadClip(profile_file::kKeyClip, &HeadParameters::key_clip));
  CRUMB_RETURN_IF_ERROR(ReadClip(profile_file::kValueClip, &HeadParameters::value_clip));
  CRUMB_RETURN_IF_ERROR(ReadValueLevels());
  CRUMB_RETURN_IF_ERROR(ReadKeyRanges());
  if (!contents_.tensors.empty()) {
    const auto& [name, tensor] = *contents_.tensors.begin();
    return Refuse("tensor '", Printable(name), "' ", ShapeText(tensor.shape),
                  " has no place in a profile of codec ", std::string(CodecName(profile_->codec_)));
  }
  profile_->id_ = ComputeProfileId(profile_->file_);
  return std::shared_ptr<const Profile>(std::move(profile_));
}

absl::Status ProfileParser::ReadMetadata() {
  const MetadataReader metadata("profile", contents_.metadata);
  CRUMB_RETURN_IF_ERROR(metadata.CheckFormat(profile_file::kFormat));
  CRUMB_ASSIGN_OR_RETURN(const std::string codec, metadata.Text(profile_file::kCodecKey));
  const std::optional<CodecId> known = CodecFromName(codec);
  if (!known.has_value()) {
    return Refuse("metadata 'codec' is '", Printable(codec), "'; this version knows ",
                  CodecNames());
  }
  profile_->codec_ = *known;
  CRUMB_ASSIGN_OR_RETURN(profile_->model_, metadata.Model());
  const auto choices = contents_.metadata.find(profile_file::kChoicesKey);
  if (choices != contents_.metadata.end()) {
    profile_->choices_ = choices->second;
  }
  CRUMB_ASSIGN_OR_RETURN(profile_->geometry_, metadata.ReadGeometry());
  return ReadWindows(metadata);
}

absl::Status ProfileParser::ReadWindows(const MetadataReader& metadata) {
  CRUMB_RETURN_IF_ERROR(
      metadata.Number(profile_file::kPageTokensKey, kPageTokens, kPageTokens).status());
  for (const auto& [key, value] :
       {std::pair(profile_file::kSinkTokensKey, &profile_->windows_.sink_tokens),
        std::pair(profile_file::kRecentTokensKey, &profile_->windows_.recent_tokens)}) {
    CRUMB_ASSIGN_OR_RETURN(const uint64_t tokens, metadata.Number(key, 0, kMaxWindowTokens));
    if (tokens % kPageTokens != 0) {
      return Refuse("metadata '", key, "' is ", tokens, "; it must be a multiple of ", kPageTokens);
    }
    *value = static_cast<uint32_t>(tokens);
  }
  return absl::OkStatus();
}

void ProfileParser::ReserveFloats() {
  // What the file holds, each tensor on a line of its own, and the mean that it may leave out.
  size_t total = kLineFloats + RoundUpToLine(profile_->geometry_.key_dim);
  for (const auto& [name, tensor] : contents_.tensors) {
    total += RoundUpToLine(tensor.data.size() / sizeof(float));
  }
  profile_->floats_.assign(total, 0.0F);
  const auto address = reinterpret_cast<uintptr_t>(profile_->floats_.data()) / sizeof(float);
  floats_taken_ = RoundUpToLine(address) - address;
}

float* ProfileParser::TakeFloats(size_t count) {
  float* taken = profile_->floats_.data() + floats_taken_;
  floats_taken_ += RoundUpToLine(count);
  CRUMB_CHECK(floats_taken_ <= profile_->floats_.size(), "more floats taken than reserved");
  return taken;
}

absl::StatusOr<const float*> ProfileParser::TakeF32(const std::string& name,
                                                    std::vector<uint64_t> shape) {
  const auto node = contents_.tensors.extract(name);
  if (node.empty()) {
    return Refuse("tensor '", name, "' is missing; F32 ", ShapeText(shape), " is expected");
  }
  const Tensor& tensor = node.mapped();
  // A tensor of another shape is refused before its floats are counted.
  size_t count = 1;
  for (const uint64_t extent : shape) {
    count *= extent;
  }
  if (tensor.data.size() != count * sizeof(float)) {
    return Refuse("tensor '", name, "' is ", std::string(TensorTypeName(tensor.type)), " ",
                  ShapeText(tensor.shape), ", expected F32 ", ShapeText(shape));
  }
  float* floats = TakeFloats(count);
  CRUMB_RETURN_IF_ERROR(CopyF32(name, tensor, shape, std::span(floats, count)));
  return floats;
}

absl::Status ProfileParser::ReadLayer(uint32_t layer) {
  CRUMB_RETURN_IF_ERROR(ReadKeyTransforms(layer));
  CRUMB_RETURN_IF_ERROR(ReadRotations(profile_file::kValueRotation, profile_->geometry_.value_dim,
                                      layer, &HeadParameters::value_rotation));
  if (HasFeedback(profile_->codec_)) {
    CRUMB_RETURN_IF_ERROR(ReadFeedback(layer));
  }
  return profile_->codec_ == CodecId::kOscarInt2Tilted ? ReadMetric(layer) : absl::OkStatus();
}

absl::Status ProfileParser::ReadKeyTransforms(uint32_t layer) {
  const Geometry& geometry = profile_->geometry_;
  if (profile_->codec_ != CodecId::kOscarInt2Tilted) {
    return ReadRotations(profile_file::kKeyRotation, geometry.key_dim, layer,
                         &HeadParameters::key_rotation);
  }
  CRUMB_RETURN_IF_ERROR(ReadMatrices(profile_file::kKeyRotation, geometry.key_dim, layer,
                                     &HeadParameters::key_rotation));
  CRUMB_RETURN_IF_ERROR(ReadMatrices(profile_file::kQueryRotation, geometry.key_dim, layer,
                                     &HeadParameters::query_rotation));
  for (uint32_t kv_head = 0; kv_head < geometry.num_kv_heads; ++kv_head) {
    CRUMB_RETURN_IF_ERROR(CheckInverse(
        absl::StrCat(profile_file::LayerTensor(profile_file::kKeyRotation, layer), "[", kv_head,
                     "]"),
        head(layer, kv_head).key_rotation, head(layer, kv_head).query_rotation, geometry.key_dim));
  }
  return absl::OkStatus();
}

absl::Status ProfileParser::ReadMatrices(const char* name,
                                         uint32_t dim,
                                         uint32_t layer,
                                         const float* HeadParameters::*member) {
  const uint32_t num_heads = profile_->geometry_.num_kv_heads;
  const size_t matrix = size_t{dim} * dim;
  const std::string tensor = profile_file::LayerTensor(name, layer);
  const auto found = contents_.tensors.find(tensor);
  if (found != contents_.tensors.end() && found->second.shape.size() == 2) {
    CRUMB_ASSIGN_OR_RETURN(const float* shared, TakeF32(tensor, {dim, dim}));
    for (uint32_t kv_head = 0; kv_head < num_heads; ++kv_head) {
      head(layer, kv_head).*member = shared;
    }
    return absl::OkStatus();
  }
  CRUMB_ASSIGN_OR_RETURN(const float* floats, TakeF32(tensor, {num_heads, dim, dim}));
  for (uint32_t kv_head = 0; kv_head < num_heads; ++kv_head) {
    head(layer, kv_head).*member = floats + kv_head * matrix;
  }
  return absl::OkStatus();
}

absl::Status ProfileParser::ReadRotations(const char* name,
                                          uint32_t dim,
                                          uint32_t layer,
                                          const float* HeadParameters::*rotation) {
  CRUMB_RETURN_IF_ERROR(ReadMatrices(name, dim, layer, rotation));
  const std::string tensor = profile_file::LayerTensor(name, layer);
  const float* last = nullptr;
  for (uint32_t kv_head = 0; kv_head < profile_->geometry_.num_kv_heads; ++kv_head) {
    const float* matrix = head(layer, kv_head).*rotation;
    if (matrix == last) {
      break;  // Shared.
    }
    const bool is_shared =
        kv_head == 0 && profile_->geometry_.num_kv_heads > 1 && head(layer, 1).*rotation == matrix;
    CRUMB_RETURN_IF_ERROR(
        CheckOrthogonal(is_shared ? tensor : absl::StrCat(tensor, "[", kv_head, "]"), matrix, dim));
    last = matrix;
  }
  return absl::OkStatus();
}

absl::Status ProfileParser::ReadMetric(uint32_t layer) {
  const uint32_t dim = profile_->geometry_.key_dim;
  const uint32_t num_heads = profile_->geometry_.num_kv_heads;
  const std::string tensor = profile_file::LayerTensor(profile_file::kKeyMetric, layer);
  CRUMB_ASSIGN_OR_RETURN(const float* floats, TakeF32(tensor, {num_heads, dim, dim}));
  for (uint32_t kv_head = 0; kv_head < num_heads; ++kv_head) {
    const float* metric = floats + size_t{kv_head} * dim * dim;
    CRUMB_RETURN_IF_ERROR(CheckSymmetric(absl::StrCat(tensor, "[", kv_head, "]"), metric, dim));
    head(layer, kv_head).key_metric = metric;
  }
  return absl::OkStatus();
}

absl::Status ProfileParser::ReadFeedback(uint32_t layer) {
  const uint32_t num_heads = profile_->geometry_.num_kv_heads;
  const uint32_t dim = profile_->geometry_.key_dim;
  const std::string tensor = profile_file::LayerTensor(profile_file::kKeyFeedback, layer);
  CRUMB_ASSIGN_OR_RETURN(const float* floats, TakeF32(tensor, {num_heads, dim, dim}));
  for (uint32_t kv_head = 0; kv_head < num_heads; ++kv_head) {
    const float* factor = floats + size_t{kv_head} * dim * dim;
    CRUMB_RETURN_IF_ERROR(
        CheckUpperTriangular(absl::StrCat(tensor, "[", kv_head, "]"), factor, dim));
    head(layer, kv_head).key_feedback = factor;
  }
  return absl::OkStatus();
}

absl::Status ProfileParser::ReadMeans(const char* name, const float* HeadParameters::*member) {
  const Geometry& geometry = profile_->geometry_;
  CRUMB_ASSIGN_OR_RETURN(
      const float* floats,
      TakeF32(name, {geometry.num_layers, geometry.num_kv_heads, geometry.key_dim}));
  for (HeadParameters& head : profile_->heads_) {
    head.*member = floats;
    floats += geometry.key_dim;
  }
  return absl::OkStatus();
}

void ProfileParser::ShareZeroMean() {
  const float* zeros = TakeFloats(profile_->geometry_.key_dim);
  for (HeadParameters& head : profile_->heads_) {
    head.key_mean = zeros;
  }
}

absl::Status ProfileParser::ReadClip(const char* name, float HeadParameters::*member) {
  const Geometry& geometry = profile_->geometry_;
  CRUMB_ASSIGN_OR_RETURN(const float* floats,
                         TakeF32(name, {geometry.num_layers, geometry.num_kv_heads}));
  for (size_t i = 0; i < profile_->heads_.size(); ++i) {
    if (floats[i] > 1) {
      return Refuse("tensor '", name, "' [", geometry.num_layers, ", ", geometry.num_kv_heads,
                    "]: the ratio of layer ", i / geometry.num_kv_heads, ", KV head ",
                    i % geometry.num_kv_heads, " is ", floats[i],
                    "; at most 1 is allowed, and 0 turns clipping off");
    }
    profile_->heads_[i].*member = floats[i];
  }
  return absl::OkStatus();
}

std::string ProfileParser::HeadName(size_t block) const {
  const uint32_t heads = profile_->geometry_.num_kv_heads;
  return absl::StrCat("layer ", block / heads, ", KV head ", block % heads);
}

absl::Status ProfileParser::ReadValueLevels() {
  const Geometry& geometry = profile_->geometry_;
  const char* const name = profile_file::kValueLevels;
  if (profile_->codec_ == CodecId::kOscarInt2Lm) {
    for (HeadParameters& head : profile_->heads_) {
      head.values_by_deviation = true;
    }
  } else if (contents_.tensors.contains(name)) {
    CRUMB_ASSIGN_OR_RETURN(const float* floats,
                           TakeF32(name, {geometry.num_layers, geometry.num_kv_heads}));
    for (size_t i = 0; i < profile_->heads_.size(); ++i) {
      if (floats[i] != 0 && floats[i] != 1) {
        return Refuse("tensor '", name, "': that of ", HeadName(i), " is ", floats[i],
                      "; 0 (within a range) and 1 (by deviation) are known");
      }
      profile_->heads_[i].values_by_deviation = floats[i] != 0;
    }
  }
  return CheckDeviationHasNoClip();
}

absl::Status ProfileParser::CheckDeviationHasNoClip() const {
  for (size_t i = 0; i < profile_->heads_.size(); ++i) {
    const HeadParameters& head = profile_->heads_[i];
    const bool has_key_clip = profile_->codec_ == CodecId::kOscarInt2Lm && head.key_clip > 0;
    if (has_key_clip || (head.values_by_deviation && head.value_clip > 0)) {
      return Refuse("tensor '", has_key_clip ? profile_file::kKeyClip : profile_file::kValueClip,
                    "': the ratio of ", HeadName(i), " is ",
                    has_key_clip ? head.key_clip : head.value_clip,
                    "; rows that are rounded by their deviation have no clip: make it 0");
    }
  }
  return absl::OkStatus();
}

absl::Status ProfileParser::ReadKeyRanges() {
  const Geometry& geometry = profile_->geometry_;
  const char* const name = profile_file::kKeyRanges;
  if (!HasFeedback(profile_->codec_) || !contents_.tensors.contains(name)) {
    return absl::OkStatus();
  }
  CRUMB_ASSIGN_OR_RETURN(
      const float* floats,
      TakeF32(name, {geometry.num_layers, geometry.num_kv_heads, kKeyRanges.size()}));
  for (size_t i = 0; i < profile_->heads_.size(); ++i) {
    for (float& ratio : profile_->heads_[i].key_ranges) {
      ratio = *floats++;
      if (!(ratio > 0 && ratio <= 1)) {
        return Refuse("tensor '", name, "': a ratio of ", HeadName(i), " is ", ratio,
                      "; above 0 and at most 1 is allowed");
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace crumb
