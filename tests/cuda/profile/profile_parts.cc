// SPDX-License-Identifier: Apache-2.0
#include "tests/cuda/profile/profile_parts.h"

#include <cmath>
#include <random>
#include <span>

#include "proto/base/check.h"

namespace crumb {
namespace {

// A random rotation: Gram-Schmidt over normal rows, in double.
std::vector<float> RandomRotation(size_t dim, std::mt19937* random) {
  std::normal_distribution<double> normal;
  std::vector<std::vector<double>> rows(dim, std::vector<double>(dim));
  for (size_t i = 0; i < dim; ++i) {
    for (double& x : rows[i]) {
      x = normal(*random);
    }
    for (size_t j = 0; j < i; ++j) {
      double dot = 0;
      for (size_t k = 0; k < dim; ++k) {
        dot += rows[i][k] * rows[j][k];
      }
      for (size_t k = 0; k < dim; ++k) {
        rows[i][k] -= dot * rows[j][k];
      }
    }
    double size = 0;
    for (const double x : rows[i]) {
      size += x * x;
    }
    for (double& x : rows[i]) {
      x /= std::sqrt(size);
    }
  }
  std::vector<float> rotation;
  for (const auto& row : rows) {
    for (const double x : row) {
      rotation.push_back(static_cast<float>(x));
    }
  }
  return rotation;
}

std::vector<float> Rotations(size_t count, size_t dim, std::mt19937* random) {
  std::vector<float> all;
  for (size_t i = 0; i < count; ++i) {
    const std::vector<float> one = RandomRotation(dim, random);
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

}  // namespace

ProfileParts SmallParts(CodecId codec, bool per_head) {
  std::mt19937 random(7);
  std::uniform_real_distribution<float> uniform(0.5F, 1.0F);
  ProfileParts parts;
  parts.model = "small";
  parts.geometry = {.num_layers = 2, .num_kv_heads = 2, .key_dim = 32, .value_dim = 64};
  parts.codec = codec;
  parts.windows = {.sink_tokens = 64, .recent_tokens = 128};
  const size_t num_rotations = per_head ? 4 : 2;
  parts.key_rotation = Rotations(num_rotations, 32, &random);
  parts.value_rotation = Rotations(num_rotations, 64, &random);
  parts.key_clip = {0.96F, 0.95F, 0.94F, 0.93F};
  parts.value_clip = {0.92F, 0.91F, 0.90F, 0.0F};
  if (codec == CodecId::kOscarInt2Lm) {
    parts.key_clip = parts.value_clip = {0, 0, 0, -1};
  }
  if (HasFeedback(codec)) {
    parts.value_levels = {0, 0, 0, 1};
    parts.key_mean.resize(size_t{4} * 32);
    for (float& x : parts.key_mean) {
      x = uniform(random);
    }
    parts.key_feedback.resize(size_t{4} * 32 * 32);
    for (size_t i = 0; i < parts.key_feedback.size(); ++i) {
      const size_t row = i / 32 % 32;
      parts.key_feedback[i] = i % 32 >= row ? uniform(random) : 0.0F;
    }
  }
  if (codec == CodecId::kOscarInt2Tilted) {
    parts.query_rotation = parts.key_rotation;
    for (size_t i = 0; i < parts.key_rotation.size(); ++i) {  // A power of two, so exactly inverse.
      const size_t row = i / 32 % 32;
      parts.key_rotation[i] *= row % 2 == 0 ? 2.0F : 0.5F;
      parts.query_rotation[i] *= row % 2 == 0 ? 0.5F : 2.0F;
    }
    parts.key_metric.resize(size_t{4} * 32 * 32);
    for (size_t i = 0; i < parts.key_metric.size(); ++i) {
      parts.key_metric[i] = i / 32 % 32 == i % 32 ? uniform(random) : 0.125F;
    }
    parts.query_mean.resize(size_t{4} * 32);
    for (float& x : parts.query_mean) {
      x = uniform(random);
    }
  }
  return parts;
}

SplitFile SplitFile::Of(const std::vector<std::byte>& file) {
  uint64_t length = 0;
  for (size_t i = 0; i < 8; ++i) {
    length |= static_cast<uint64_t>(file.at(i)) << (8 * i);
  }
  CRUMB_CHECK(8 + length <= file.size(), "not a file to split");
  const auto* begin = reinterpret_cast<const char*>(file.data());
  SplitFile split;
  split.header.assign(begin + 8, length);
  split.data.assign(file.begin() + static_cast<ptrdiff_t>(8 + length), file.end());
  return split;
}

std::vector<std::byte> SplitFile::JoinWithLength(uint64_t length) const {
  std::vector<std::byte> file;
  for (size_t i = 0; i < 8; ++i) {
    file.push_back(static_cast<std::byte>(length >> (8 * i)));
  }
  const auto bytes = std::as_bytes(std::span(header));
  file.insert(file.end(), bytes.begin(), bytes.end());
  file.insert(file.end(), data.begin(), data.end());
  return file;
}

SplitFile& SplitFile::Replace(const std::string& from, const std::string& to) {
  const size_t at = header.find(from);
  CRUMB_CHECK(at != std::string::npos, from.c_str());
  header.replace(at, from.size(), to);
  return *this;
}

}  // namespace crumb
