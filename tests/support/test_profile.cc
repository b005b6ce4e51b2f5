// SPDX-License-Identifier: Apache-2.0
#include "tests/support/test_profile.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <utility>
#include <vector>

namespace crumb {
namespace {

// Rows of a Gaussian matrix, orthonormalised one after another; twice, against rounding.
std::vector<float> RandomRotation(uint32_t dim, std::mt19937* random) {
  std::normal_distribution<double> normal;
  std::vector<double> rows(size_t{dim} * dim);
  for (double& value : rows) {
    value = normal(*random);
  }
  for (size_t row = 0; row < dim; ++row) {
    double* current = rows.data() + row * dim;
    for (int pass = 0; pass < 2; ++pass) {
      for (size_t other = 0; other < row; ++other) {
        const double* earlier = rows.data() + other * dim;
        double dot = 0;
        for (size_t i = 0; i < dim; ++i) {
          dot += current[i] * earlier[i];
        }
        for (size_t i = 0; i < dim; ++i) {
          current[i] -= dot * earlier[i];
        }
      }
    }
    double norm = 0;
    for (size_t i = 0; i < dim; ++i) {
      norm += current[i] * current[i];
    }
    for (size_t i = 0; i < dim; ++i) {
      current[i] /= std::sqrt(norm);
    }
  }
  return {rows.begin(), rows.end()};
}

std::vector<float> RandomFeedback(uint32_t dim, std::mt19937* random) {
  std::normal_distribution<float> normal(0, 0.1f);
  std::vector<float> factor(size_t{dim} * dim);
  for (size_t row = 0; row < dim; ++row) {
    factor[row * dim + row] = 0.75f + std::fabs(normal(*random));
    for (size_t column = row + 1; column < dim; ++column) {
      factor[row * dim + column] = normal(*random);
    }
  }
  return factor;
}

// Scales the keys' channels by powers of two, so that queries undo it exactly; a metric to match.
void AddTilt(uint32_t dim, std::mt19937* random, ProfileParts* parts) {
  parts->query_rotation = parts->key_rotation;
  for (size_t i = 0; i < parts->key_rotation.size(); ++i) {
    const size_t column = i % dim;
    const float scale = column % 3 == 0 ? 2.0f : column % 3 == 1 ? 1.0f : 0.5f;
    parts->key_rotation[i] *= scale;
    parts->query_rotation[i] /= scale;
  }
  std::normal_distribution<float> normal;
  for (size_t block = 0; block < parts->geometry.NumHeadBlocks(); ++block) {
    for (size_t i = 0; i < size_t{dim} * dim; ++i) {
      parts->key_metric.push_back(i / dim == i % dim ? 1.0f : 0.001f);
    }
    for (uint32_t channel = 0; channel < dim; ++channel) {
      parts->query_mean.push_back(0.1f * normal(*random));
    }
  }
}

void Append(const std::vector<float>& values, std::vector<float>* out) {
  out->insert(out->end(), values.begin(), values.end());
}

}  // namespace

std::shared_ptr<const Profile> MakeTestProfile(const TestProfileOptions& options) {
  const Geometry& geometry = options.geometry;
  std::mt19937 random(options.seed);
  std::normal_distribution<float> normal;
  ProfileParts parts;
  parts.model = "test";
  parts.geometry = geometry;
  parts.codec = options.codec;
  parts.windows = options.windows;
  const uint32_t rotations = options.rotation_per_layer ? 1 : geometry.num_kv_heads;
  for (uint32_t i = 0; i < geometry.num_layers * rotations; ++i) {
    Append(RandomRotation(geometry.key_dim, &random), &parts.key_rotation);
    Append(RandomRotation(geometry.value_dim, &random), &parts.value_rotation);
  }
  for (size_t i = 0; i < geometry.NumHeadBlocks(); ++i) {
    for (uint32_t channel = 0; channel < geometry.key_dim; ++channel) {
      parts.key_mean.push_back(normal(random));
    }
    if (HasFeedback(options.codec)) {
      Append(RandomFeedback(geometry.key_dim, &random), &parts.key_feedback);
    }
    const bool is_clipped = options.codec != CodecId::kOscarInt2Lm;
    parts.key_clip.push_back(is_clipped ? 0.96f : 0.0f);
    parts.value_clip.push_back(is_clipped ? 0.92f : 0.0f);
    if (options.narrow_key_ranges) {
      Append({0.96f, 0.92f, 0.86f}, &parts.key_ranges);
    }
  }
  if (options.codec == CodecId::kOscarInt2Tilted) {
    AddTilt(geometry.key_dim, &random, &parts);
  }
  auto file = Profile::Serialize(parts);
  auto profile = file.ok() ? Profile::Parse(*std::move(file)) : file.status();
  if (!profile.ok()) {
    std::fprintf(stderr, "test profile: %s\n", profile.status().ToString().c_str());
    std::abort();
  }
  return *std::move(profile);
}

}  // namespace crumb
