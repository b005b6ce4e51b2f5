// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "crumb/cuda/profile.h"
#include "crumb/cuda/statistics.h"
#include "cuda/profile/safetensors.h"
#include "proto/base/check.h"
#include "tests/cuda/profile/profile_parts.h"
#include "tests/fuzz/fuzz_subject.h"

namespace crumb {
namespace {

bool AllFinite(std::span<const float> floats) {
  return std::ranges::all_of(floats, [](float x) { return std::isfinite(x); });
}

// Reads all that a head points to, so that a sanitizer sees each address.
void CheckHead(const HeadParameters& head, const Profile& profile) {
  const size_t key_dim = profile.geometry().key_dim;
  const size_t value_dim = profile.geometry().value_dim;
  CRUMB_CHECK(head.key_dim == key_dim && head.value_dim == value_dim, "a head of other dims");
  CRUMB_CHECK(AllFinite({head.key_rotation, key_dim * key_dim}), "key rotation not finite");
  CRUMB_CHECK(AllFinite({head.value_rotation, value_dim * value_dim}), "value rotation not finite");
  CRUMB_CHECK(AllFinite({head.key_mean, key_dim}), "key mean not finite");
  CRUMB_CHECK((head.key_feedback != nullptr) == HasFeedback(profile.codec()),
              "feedback does not follow the codec");
  if (head.key_feedback != nullptr) {
    CRUMB_CHECK(AllFinite({head.key_feedback, key_dim * key_dim}), "feedback not finite");
    for (size_t i = 0; i < key_dim; ++i) {
      CRUMB_CHECK(head.key_feedback[i * key_dim + i] > 0, "feedback's diagonal not positive");
    }
  }
  const bool is_tilted = profile.codec() == CodecId::kOscarInt2Tilted;
  CRUMB_CHECK(
      (head.key_metric != nullptr) == is_tilted && (head.query_mean != nullptr) == is_tilted,
      "the metric does not follow the codec");
  if (is_tilted) {
    CRUMB_CHECK(AllFinite({head.query_rotation, key_dim * key_dim}), "query rotation not finite");
    CRUMB_CHECK(AllFinite({head.key_metric, key_dim * key_dim}), "metric not finite");
    CRUMB_CHECK(AllFinite({head.query_mean, key_dim}), "query mean not finite");
  }
  CRUMB_CHECK(head.key_clip <= 1 && head.value_clip <= 1, "clip ratio above 1");
}

void CheckRefusal(const absl::Status& status) {
  CRUMB_CHECK(status.code() == absl::StatusCode::kInvalidArgument, "refused with another code");
  CRUMB_CHECK(!status.message().empty() && status.message().size() < 1000, "odd length of message");
  CRUMB_CHECK(std::ranges::all_of(status.message(), [](char c) { return c >= ' ' && c <= '~'; }),
              "message with bytes that are not printable");
}

bool ReadProfile(std::span<const std::byte> input) {
  const auto profile = Profile::Parse({input.begin(), input.end()});
  if (!profile.ok()) {
    CheckRefusal(profile.status());
    return false;
  }
  const Geometry& geometry = (*profile)->geometry();
  CRUMB_CHECK(geometry.IsValid(), "geometry not valid");
  CRUMB_CHECK(std::ranges::equal((*profile)->file(), input), "keeps another file");
  for (uint32_t layer = 0; layer < geometry.num_layers; ++layer) {
    for (uint32_t kv_head = 0; kv_head < geometry.num_kv_heads; ++kv_head) {
      CheckHead((*profile)->head(layer, kv_head), **profile);
    }
  }
  return true;
}

bool ReadStatistics(std::span<const std::byte> input) {
  const auto statistics = Statistics::Parse(input);
  if (!statistics.ok()) {
    CheckRefusal(statistics.status());
    return false;
  }
  const size_t blocks = statistics->geometry.NumHeadBlocks();
  CRUMB_CHECK(statistics->geometry.IsValid(), "geometry not valid");
  CRUMB_CHECK(statistics->key_mean.size() == blocks * statistics->geometry.key_dim, "mean's size");
  const auto again = Statistics::Serialize(*statistics);
  CRUMB_CHECK(again.ok(), "what was read cannot be written");
  return true;
}

bool ReadSafetensors(std::span<const std::byte> input) {
  const auto contents = ParseSafetensors(input);
  if (!contents.ok()) {
    CheckRefusal(contents.status());
    return false;
  }
  size_t data_bytes = 0;
  for (const auto& [name, tensor] : contents->tensors) {
    data_bytes += tensor.data.size();
  }
  CRUMB_CHECK(data_bytes < input.size(), "tensors of more bytes than the file");
  // Written and read again it is the same, but for the order.
  const std::vector<std::byte> again = SerializeSafetensors(*contents);
  const auto reread = ParseSafetensors(again);
  CRUMB_CHECK(reread.ok() && reread->metadata == contents->metadata, "does not survive rewriting");
  return true;
}

ProfileParts TinyParts() {
  ProfileParts parts;
  parts.model = "tiny";
  parts.geometry = {.num_layers = 1, .num_kv_heads = 1, .key_dim = 32, .value_dim = 32};
  parts.codec = CodecId::kOscarInt2;
  parts.key_rotation.resize(32 * 32);
  for (size_t i = 0; i < 32; ++i) {
    parts.key_rotation[i * 33] = 1;
  }
  parts.value_rotation = parts.key_rotation;
  parts.key_clip = {0.96F};
  parts.value_clip = {0.92F};
  return parts;
}

Statistics TinyStatistics() {
  Statistics statistics;
  statistics.model = "tiny";
  statistics.geometry = {.num_layers = 1, .num_kv_heads = 1, .key_dim = 32, .value_dim = 32};
  statistics.num_query_heads = 1;
  statistics.num_texts = 1;
  statistics.num_tokens = 300;
  statistics.query_moment.resize(32 * 32);
  for (size_t i = 0; i < 32; ++i) {
    statistics.query_moment[i * 33] = 1;
  }
  statistics.value_covariance = statistics.key_moment = statistics.query_moment;
  statistics.value_moment = statistics.value_attention_covariance = statistics.query_moment;
  statistics.key_mean.resize(32);
  statistics.query_mean.resize(32);
  statistics.value_mean.resize(32);
  statistics.attention_windows = {0};
  statistics.reservoir.key_tokens = {{0, 64}, {0, 70}, {2, 64}};
  statistics.reservoir.query_tokens = {{2, 256}};
  statistics.reservoir.keys.resize(size_t{3} * 32);
  statistics.reservoir.values.resize(size_t{3} * 32);
  statistics.reservoir.queries.resize(32);
  statistics.reservoir.outputs.resize(32);
  statistics.reservoir.lse.resize(1);
  return statistics;
}

}  // namespace

std::vector<FuzzSeed> FuzzSeeds() {
  return {{"tiny", *Profile::Serialize(TinyParts())},
          {"nearest", *Profile::Serialize(SmallParts(CodecId::kOscarInt2))},
          {"lm", *Profile::Serialize(SmallParts(CodecId::kOscarInt2Lm))},
          {"aware", *Profile::Serialize(SmallParts(CodecId::kOscarInt2Aware, false))},
          {"tilted", *Profile::Serialize(SmallParts(CodecId::kOscarInt2Tilted))},
          {"statistics", *Statistics::Serialize(TinyStatistics())}};
}

bool FuzzOne(std::span<const std::byte> input) {
  const bool is_safetensors = ReadSafetensors(input);
  const bool is_profile = ReadProfile(input);
  const bool is_statistics = ReadStatistics(input);
  CRUMB_CHECK(is_safetensors || !(is_profile || is_statistics), "more than the format allows");
  return is_profile || is_statistics;
}

}  // namespace crumb
