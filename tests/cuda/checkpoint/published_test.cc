// SPDX-License-Identifier: Apache-2.0
//
// The rotations that OSCAR's authors published, as they are. The folder is ../shared/data beside
// the repository, or CRUMB_PUBLISHED_ROTATIONS of the environment.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <span>
#include <string>

#include "cuda/checkpoint/rotation_checkpoint.h"

namespace crumb::checkpoint {
namespace {

struct Published {
  const char* name;
  const char* objective;
  size_t num_layers;
  uint32_t last_layer;
  uint32_t dim;
};

class PublishedRotationsTest : public testing::TestWithParam<Published> {};

// The largest |R R^T - I|.
double OrthogonalityError(std::span<const float> rotation, size_t dim) {
  double largest = 0;
  for (size_t row = 0; row < dim; ++row) {
    for (size_t other = 0; other <= row; ++other) {
      double dot = row == other ? -1 : 0;
      for (size_t k = 0; k < dim; ++k) {
        dot += double{rotation[row * dim + k]} * double{rotation[other * dim + k]};
      }
      largest = std::max(largest, std::abs(dot));
    }
  }
  return largest;
}

TEST_P(PublishedRotationsTest, AreReadAndOrthogonal) {
  const char* wish = std::getenv("CRUMB_PUBLISHED_ROTATIONS");  // NOLINT(concurrency-mt-unsafe)
  const std::filesystem::path folder = wish == nullptr ? CRUMB_PUBLISHED_ROTATIONS : wish;
  const std::filesystem::path path = folder / GetParam().name;
  if (!std::filesystem::exists(path)) {
    GTEST_SKIP() << path << " is not there; set CRUMB_PUBLISHED_ROTATIONS to its folder";
  }
  const auto checkpoint = LoadRotationCheckpoint(path);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->objective, GetParam().objective);
  EXPECT_FALSE(checkpoint->is_per_head);
  EXPECT_EQ(checkpoint->dim, GetParam().dim);
  EXPECT_EQ(checkpoint->layer_ids.size(), GetParam().num_layers);
  EXPECT_EQ(checkpoint->layer_ids.back(), GetParam().last_layer);
  const size_t matrix = size_t{checkpoint->dim} * checkpoint->dim;
  for (const size_t layer : {size_t{0}, GetParam().num_layers - 1}) {
    const auto rotation = std::span(checkpoint->rotations).subspan(layer * matrix, matrix);
    // Made in double and rounded to float; measured: at most 3.1e-8.
    EXPECT_LT(OrthogonalityError(rotation, checkpoint->dim), 1e-6) << layer;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Qwen,
    PublishedRotationsTest,
    testing::Values(Published{"qwen3-8b_k_rotation_qqt_r_h_pbr.pt", "qqt_r_h_pbr", 36, 35, 128},
                    Published{"qwen3-8b_v_rotation_sst_r_h_pbr.pt", "sst_r_h_pbr", 36, 35, 128},
                    Published{"qwen3.5-4b_k_rotation.pt", "qqt_r_h_pbr", 8, 31, 256},
                    Published{"qwen3.5-4b_v_rotation.pt", "sst_r_h_pbr", 8, 31, 256}));

}  // namespace
}  // namespace crumb::checkpoint
