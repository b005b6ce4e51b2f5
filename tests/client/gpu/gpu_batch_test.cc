// SPDX-License-Identifier: Apache-2.0
//
// Prefilling and decoding: outputs and pages are the CPU's.
#include "crumb/gpu_batch.h"

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "tests/client/gpu/gpu_batch_fixture.h"
#include "tests/support/test_profile.h"

namespace crumb {
namespace {

TEST_F(GpuBatchTest, PrefillAndDecodeAcrossPagesAreTheCpus) {
  GpuScene scene(FloatOptions());
  const auto live = scene.NewLive(1);
  for (const uint32_t chunk : {100u, 1u, 27u, 128u, 64u, 1u, 190u}) {
    ASSERT_NO_FATAL_FAILURE(scene.Step(live.get(), chunk));
    ASSERT_NO_FATAL_FAILURE(scene.ExpectSamePages(*live));
  }
  for (int i = 0; i < 150; ++i) {
    ASSERT_NO_FATAL_FAILURE(scene.Step(live.get(), 1));
  }
  ASSERT_NO_FATAL_FAILURE(scene.ExpectSamePages(*live));
  EXPECT_TRUE(scene.batch().TakeProblem(scene.stream()).ok());
}

TEST_F(GpuBatchTest, OutputsAreInTheModelsCoordinatesUnlessToldOtherwise) {
  GpuScene scene(Options());
  const auto live = scene.NewLive(2);
  ASSERT_NO_FATAL_FAILURE(scene.Step(live.get(), 250));
  for (int i = 0; i < 80; ++i) {
    ASSERT_NO_FATAL_FAILURE(scene.Step(live.get(), 1));
  }
}

TEST_F(GpuBatchTest, RotationsOfARealProfileAreUndone) {
  GpuSceneOptions options = Options();
  options.profile =
      MakeTestProfile({.geometry = kGeometry, .windows = kWindows, .codec = CodecId::kOscarInt2});
  // Rows are rounded after a sum in another order, so that an element of a row in ten falls on the
  // other side of a border between codes, and is a tenth of its row off. Without the rotation, or
  // with another head's, a row of outputs would be off by its length.
  options.tolerance = options.chunk_tolerance = 0.2;
  GpuScene scene(options);
  const auto live = scene.NewLive(3);
  ASSERT_NO_FATAL_FAILURE(scene.Step(live.get(), 256));
  ASSERT_NO_FATAL_FAILURE(scene.Step(live.get(), 130));
  for (int i = 0; i < 20; ++i) {
    ASSERT_NO_FATAL_FAILURE(scene.Step(live.get(), 1));
  }
}

TEST_F(GpuBatchTest, QueriesOfATiltedProfileHaveTheirOwnRotation) {
  GpuSceneOptions options = Options();
  options.profile = MakeTestProfile(
      {.geometry = kGeometry, .windows = kWindows, .codec = CodecId::kOscarInt2Tilted});
  options.tolerance = 0.02;
  GpuScene scene(options);
  const auto live = scene.NewLive(3);
  ASSERT_NO_FATAL_FAILURE(scene.Step(live.get(), 100));
  for (int i = 0; i < 60; ++i) {  // Of windows alone: codes with feedback are others on a GPU.
    ASSERT_NO_FATAL_FAILURE(scene.Step(live.get(), 1));
  }
}

TEST_F(GpuBatchTest, RankHasItsOwnHeads) {
  GpuSceneOptions options = FloatOptions();
  options.heads = {1, 1};
  GpuScene scene(options);
  const auto live = scene.NewLive(4);
  ASSERT_NO_FATAL_FAILURE(scene.Step(live.get(), 256));
  ASSERT_NO_FATAL_FAILURE(scene.Step(live.get(), 70));
  ASSERT_NO_FATAL_FAILURE(scene.Step(live.get(), 1));
  ASSERT_NO_FATAL_FAILURE(scene.ExpectSamePages(*live));
}

TEST_F(GpuBatchTest, HalvesArePrefilledAndDecodedToo) {
  GpuSceneOptions options = Options();
  options.type = options.out_type = ElementType::kFp16;
  GpuScene scene(options);
  const auto live = scene.NewLive(5);
  for (const uint32_t tokens : {1u, 200u, 1u, 70u, 1u}) {
    ASSERT_NO_FATAL_FAILURE(scene.Step(live.get(), tokens));
  }
}

TEST_F(GpuBatchTest, MembersComeGrowAndGo) {
  for (const uint32_t seed : {1u, 2u, 3u}) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    GpuSceneOptions options = FloatOptions();
    options.int2_pages = options.bf16_pages = 120;
    GpuScene scene(options);
    std::mt19937 random(seed);
    std::vector<std::unique_ptr<Live>> lives;
    for (uint32_t step = 0; step < 60; ++step) {
      while (lives.size() < 6) {
        lives.push_back(
            scene.NewLive(seed * 1000 + step * 10 + static_cast<uint32_t>(lives.size())));
      }
      if (random() % 3 == 0) {
        std::shuffle(lives.begin(), lives.end(), random);
      }
      std::vector<Member> members;
      for (size_t i = 0; i < 1 + random() % options.max_sequences; ++i) {
        const bool is_new = lives[i]->gpu->length() == 0;
        const auto chunk = static_cast<uint32_t>(2 + random() % 60);
        members.push_back({lives[i].get(), is_new || random() % 4 == 0 ? chunk : 1});
      }
      std::stable_partition(members.begin(), members.end(),
                            [](const Member& member) { return member.num_tokens == 1; });
      ASSERT_NO_FATAL_FAILURE(scene.Step(members));
      ASSERT_NO_FATAL_FAILURE(scene.ExpectSamePages(*members.back().live));
      std::erase_if(
          lives, [&](const auto& live) { return live->gpu->length() > 600 || random() % 40 == 0; });
    }
    lives.clear();
    const GpuPagePool::Usage usage = scene.pool().usage(PageEncoding::kInt2);
    EXPECT_EQ(usage.num_free, usage.num_pages);
    EXPECT_TRUE(scene.batch().TakeProblem(scene.stream()).ok());
  }
}

TEST_F(GpuBatchTest, OneGraphServesAnyLengthsAndMembers) {
  GpuScene scene(FloatOptions());
  auto lives = Prefilled(&scene, {250, 70, 1, 180});
  const auto graph = scene.Capture(4);
  std::mt19937 random(7);
  std::vector<Member> members = Decoding(lives);
  for (int i = 0; i < 200; ++i) {  // Three pages further, and over their borders at other times.
    ASSERT_NO_FATAL_FAILURE(scene.Replay(members, graph.get()));
    if (i == 90) {  // Another takes a row that was someone's.
      lives[1] = scene.NewLive(77);
      ASSERT_NO_FATAL_FAILURE(scene.Step(lives[1].get(), 200));
    }
    if (i == 90 || i % 20 == 19) {
      members = Decoding(lives);
      std::shuffle(members.begin(), members.end(), random);
      members.resize(1 + random() % 4);
    }
  }
  for (const auto& live : lives) {
    ASSERT_NO_FATAL_FAILURE(scene.ExpectSamePages(*live));
  }
  EXPECT_TRUE(scene.batch().TakeProblem(scene.stream()).ok());
}

TEST_F(GpuBatchTest, EngineMayBeAStepAheadOfTheGpu) {
  GpuScene scene(FloatOptions());
  const auto lives = Prefilled(&scene, {250, 130});
  std::vector<GpuScene::Outputs> outputs(70);
  std::vector<std::vector<Member>> steps;
  for (size_t i = 0; i < outputs.size(); ++i) {
    std::vector<Member> members = Decoding(lives);
    if (i % 7 == 3) {
      std::swap(members[0], members[1]);
    }
    steps.push_back(members);
    const absl::Status begun = scene.Begin(members);
    ASSERT_TRUE(begun.ok()) << begun;
    scene.EnqueueRows(members);
    scene.EnqueueLayers();
    scene.EnqueueDownload(&outputs[i], 2);
    ASSERT_TRUE(scene.batch().EndStep(scene.stream()).ok());
  }
  scene.Wait();
  EXPECT_TRUE(scene.batch().Validate().ok());
  for (size_t i = 0; i < outputs.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "step " << i);
    ASSERT_NO_FATAL_FAILURE(scene.ExpectCpus(steps[i], outputs[i]));
  }
}

}  // namespace
}  // namespace crumb
