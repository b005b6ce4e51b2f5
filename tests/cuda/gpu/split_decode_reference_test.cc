// SPDX-License-Identifier: Apache-2.0
//
// The twins of split and shared decode against plain sums over the numbers that a scene is made of.
// Needs no GPU; what the kernels are held against is right.
#include "gtest/gtest.h"

#include "crumb/cuda/shared_decode.h"
#include "crumb/cuda/split_decode.h"
#include "tests/cuda/gpu/decode_scene.h"

namespace crumb {
namespace {

// Through split decode's twin, or with the scene's shared pages as a prefix through shared
// decode's.
DecodeScene::Result RunTwin(const DecodeScene& scene, bool as_prefix = false) {
  const auto history = scene.HistoryTable(scene.int2_arena().data());
  const auto windows = scene.WindowTable(scene.bf16_arena().data());
  auto pages = scene.HistoryPages();
  const auto tokens = scene.WindowTokens();
  alignas(256) static std::byte workspace[256];
  DecodeScene::Result result;
  result.out.resize(scene.num_rows() * scene.shape().head_dim);
  result.lse.resize(scene.num_rows());
  SplitDecodeParams params = scene.Params();
  params.queries = scene.queries().data();
  params.out = result.out.data();
  params.lse = result.lse.data();
  params.history.pages = history.data();
  params.history_pages = pages.data();
  params.windows.pages = windows.data();
  params.window_tokens = tokens.data();
  params.workspace = workspace;
  absl::Status status;
  if (as_prefix) {
    const uint32_t shared = scene.shape().shared_pages;
    for (uint32_t& count : pages) {
      count -= shared;
    }
    SharedDecodeParams prefixed{.batch = params, .prefix = params.history, .prefix_pages = &shared};
    prefixed.prefix.stride = shared;
    // A sequence's own pages follow the shared ones in the scene's table: a table of them alone.
    std::vector<const std::byte*> own;
    const uint32_t stride = params.history.stride;
    for (size_t i = 0; i < history.size(); ++i) {
      if (i % stride >= shared) {
        own.push_back(history[i]);
      }
    }
    prefixed.batch.history.pages = own.data();
    prefixed.batch.history.stride = stride - shared;
    status = SharedDecodeReference(prefixed);
  } else {
    status = SplitDecodeReference(params);
  }
  EXPECT_TRUE(status.ok()) << status;
  return result;
}

class SplitDecodeReferenceTest : public testing::TestWithParam<SceneShape> {};

TEST_P(SplitDecodeReferenceTest, IsThePlainSums) {
  const DecodeScene scene(GetParam());
  const auto expected = scene.Expected();
  const auto got = RunTwin(scene);
  EXPECT_LT(WorstError(got.out, expected.out), 1e-6);
  EXPECT_LT(WorstError(got.lse, expected.lse), 1e-6);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes,
    SplitDecodeReferenceTest,
    testing::Values(
        SceneShape{.head_dim = 64, .group = 3, .lengths = {{2, 70}, {0, 1}, {1, 0}, {0, 0}}},
        SceneShape{.head_dim = 128,
                   .group = 4,
                   .lengths = {{3, 65}, {1, 320}},
                   .query_type = ElementType::kFp16},
        SceneShape{.head_dim = 256, .num_kv_heads = 1, .group = 16, .lengths = {{1, 5}}},
        SceneShape{.group = 2, .lengths = {{3, 3}, {3, 9}}, .shared_pages = 2},
        SceneShape{.group = 12, .lengths = {{2, 64}, {1, 64}}, .planted = true}));

TEST(SharedDecodeReferenceTest, IsThePlainSums) {
  const DecodeScene scene(
      {.head_dim = 128, .group = 4, .lengths = {{3, 3}, {2, 0}, {5, 70}}, .shared_pages = 2});
  const auto expected = scene.Expected();
  const auto got = RunTwin(scene, true);
  EXPECT_LT(WorstError(got.out, expected.out), 1e-6);
  EXPECT_LT(WorstError(got.lse, expected.lse), 1e-6);
}

TEST(DecodeSceneTest, EachHeadFindsWhatWasPlantedForIt) {
  const DecodeScene scene(
      {.num_kv_heads = 2, .group = 5, .lengths = {{2, 64}, {1, 0}}, .planted = true});
  const auto expected = scene.Expected();
  for (size_t row = 0; row < scene.num_rows(); ++row) {
    const auto value = static_cast<float>(row % 5 + 1 + 64 * (row / 5));
    EXPECT_NEAR(expected.out[row * 64], value, 1e-6f);
    EXPECT_NEAR(expected.out[row * 64 + 63], value, 1e-6f);
  }
}

}  // namespace
}  // namespace crumb
