// SPDX-License-Identifier: Apache-2.0
//
// Sequences on a GPU step by step beside the same on the CPU. Built twice: for a GPU, and with the
// pretended one, whose ops are the readable twins.
#include "crumb/gpu_batch.h"

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/client/gpu/gpu_scene.h"
#include "tests/client/sequence/sequence_testing.h"
#include "tests/cuda/gpu/gpu_fixture.h"
#include "tests/support/test_profile.h"

namespace crumb {
namespace {

using testing::HasSubstr;
using Live = GpuScene::Live;
using Member = GpuScene::Member;

constexpr Geometry kGeometry{2, 2, 64, 64};
constexpr Windows kWindows{.sink_tokens = 64, .recent_tokens = 128};

class GpuBatchTest : public GpuFixture<testing::Test> {
 protected:
  // Of results that are rounded to bf16 twice, once before they are rotated back.
  static GpuSceneOptions Options() { return {.profile = MakeExactProfile(kGeometry, kWindows)}; }
  // Of results in f32, as attention gives them: what is left is attention's own arithmetic.
  static GpuSceneOptions FloatOptions() {
    GpuSceneOptions options = Options();
    options.keeps_outputs_rotated = true;
    options.out_type = ElementType::kFloat32;
    options.tolerance = 0.004;
    return options;
  }
  // Sequences that have been prefilled to these lengths.
  static std::vector<std::unique_ptr<Live>> Prefilled(GpuScene* scene,
                                                      const std::vector<uint32_t>& lengths) {
    std::vector<std::unique_ptr<Live>> lives;
    for (const uint32_t length : lengths) {
      lives.push_back(scene->NewLive(static_cast<uint32_t>(100 + lives.size())));
      scene->Step(lives.back().get(), length);
    }
    return lives;
  }
  static std::vector<Member> Decoding(const std::vector<std::unique_ptr<Live>>& lives) {
    std::vector<Member> members;
    for (const auto& live : lives) {
      members.push_back({live.get(), 1});
    }
    return members;
  }
};

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

TEST_F(GpuBatchTest, HalvesAreDecodedToo) {
  GpuSceneOptions options = Options();
  options.type = options.out_type = ElementType::kFp16;
  options.max_tokens = options.max_sequences;
  GpuScene scene(options);
  const auto live = scene.NewLive(5);
  for (int i = 0; i < 90; ++i) {
    ASSERT_NO_FATAL_FAILURE(scene.Step(live.get(), 1));
  }
  const absl::Status status = scene.Begin(std::vector<Member>{{live.get(), 2}});
  EXPECT_THAT(std::string(status.message()), HasSubstr("member 0: it brings 2 tokens"));
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

TEST_F(GpuBatchTest, AdoptedPrefixIsReadInPlaceAndGrownBeyond) {
  GpuScene scene(FloatOptions());
  const auto publisher = scene.NewLive(9);
  ASSERT_TRUE(publisher->cpu->RetainTail(320).ok());
  ASSERT_TRUE(publisher->gpu->RetainTail(320).ok());
  ASSERT_NO_FATAL_FAILURE(scene.Step(publisher.get(), 200));
  ASSERT_NO_FATAL_FAILURE(scene.Step(publisher.get(), 200));
  ASSERT_NO_FATAL_FAILURE(scene.ExpectSamePages(*publisher));

  const std::shared_ptr<const Profile> profile(&scene.pool().profile(), [](const Profile*) {});
  const auto on_gpu = std::make_shared<DevicePrefix>(*publisher->cpu, 5);
  const auto readers = Prefilled(&scene, {30});
  for (int i = 0; i < 2; ++i) {
    auto reader = scene.NewLive(50 + static_cast<uint32_t>(i));
    ASSERT_TRUE(reader->gpu->Adopt(on_gpu).ok());
    ASSERT_TRUE(reader->cpu->Adopt(FakePrefix::Of(*publisher->cpu, profile, 5)).ok());
    EXPECT_EQ(reader->gpu->length(), 320u);
    EXPECT_EQ(reader->gpu->footprint().own_bf16_bytes, 0u);
    EXPECT_EQ(reader->gpu->Page(PageIdx(2), PageEncoding::kInt2),
              on_gpu->GpuPage(PageIdx(2), PageEncoding::kInt2));
    const std::vector<Member> both = {{readers[0].get(), 1}, {reader.get(), 40}};
    ASSERT_NO_FATAL_FAILURE(scene.Step(both));
    for (int token = 0; token < 130; ++token) {
      ASSERT_NO_FATAL_FAILURE(
          scene.Step(std::vector<Member>{{readers[0].get(), 1}, {reader.get(), 1}}));
    }
    ASSERT_NO_FATAL_FAILURE(scene.ExpectSamePages(*reader));
    EXPECT_EQ(reader->gpu->Adopt(on_gpu).code(), absl::StatusCode::kFailedPrecondition);
  }
}

TEST_F(GpuBatchTest, PagesThatAPrefixHasInBf16AloneAreDemotedFirst) {
  GpuScene scene(FloatOptions());
  const auto publisher = scene.NewLive(9);
  ASSERT_TRUE(publisher->cpu->RetainTail(192).ok());
  ASSERT_NO_FATAL_FAILURE(scene.Step(publisher.get(), 250));
  ASSERT_NO_FATAL_FAILURE(scene.Step(publisher.get(), 250));
  const std::shared_ptr<const Profile> profile(&scene.pool().profile(), [](const Profile*) {});
  const auto prefix = std::make_shared<DevicePrefix>(*publisher->cpu, 5);
  const auto on_cpu = FakePrefix::Of(*publisher->cpu, profile, 5);
  // As a daemon that had no time to demote them.
  for (const uint32_t page : {1u, 2u}) {
    ASSERT_NE(prefix->GpuPage(PageIdx(page), PageEncoding::kBf16), nullptr);
    prefix->Drop(PageIdx(page), PageEncoding::kInt2);
  }
  const auto reader = scene.NewLive(51);
  ASSERT_TRUE(reader->gpu->Adopt(prefix).ok());
  ASSERT_TRUE(reader->cpu->Adopt(on_cpu).ok());
  for (const uint32_t tokens : {1u, 70u, 1u}) {
    ASSERT_NO_FATAL_FAILURE(scene.Step(reader.get(), tokens));
  }
  EXPECT_EQ(reader->gpu->footprint().own_int2_bytes,
            reader->cpu->footprint().own_int2_bytes + 2 * kGeometry.PageBytes(PageEncoding::kInt2));
}

TEST_F(GpuBatchTest, PrefixThatIsNoLongerValidFailsTheStepAndTheOthersAreAskedOnce) {
  GpuScene scene(Options());
  const auto publisher = scene.NewLive(9);
  ASSERT_NO_FATAL_FAILURE(scene.Step(publisher.get(), 250));
  const auto prefix = std::make_shared<DevicePrefix>(*publisher->cpu, 3);
  std::vector<std::unique_ptr<Live>> readers;
  for (uint32_t i = 0; i < 2; ++i) {
    readers.push_back(scene.NewLive(60 + i));
    ASSERT_TRUE(readers[i]->gpu->Adopt(prefix).ok());
  }
  const std::vector<Member> members = Decoding(readers);
  const auto run = [&] {
    ASSERT_TRUE(scene.Begin(members).ok());
    scene.EnqueueRows(members);
    scene.EnqueueLayers();
    ASSERT_TRUE(scene.batch().EndStep(scene.stream()).ok());
    scene.Wait();
  };
  run();
  EXPECT_TRUE(scene.batch().Validate().ok());
  EXPECT_EQ(prefix->num_validations, 1);
  prefix->valid = absl::FailedPreconditionError("lease 7 is over");
  run();
  const absl::Status status = scene.batch().Validate();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("member 0: lease 7 is over"));
  EXPECT_FALSE(readers[1]->gpu->Validate().ok());
}

TEST_F(GpuBatchTest, PoolWithoutPagesRefusesTheStepAndGoesOnWhenThereAreSome) {
  GpuSceneOptions options = FloatOptions();
  options.bf16_pages = 9;
  options.int2_pages = 6;
  GpuScene scene(options);
  const auto first = scene.NewLive(1);
  auto second = scene.NewLive(2);
  ASSERT_NO_FATAL_FAILURE(scene.Step(first.get(), 128));
  ASSERT_NO_FATAL_FAILURE(scene.Step(second.get(), 256));
  const auto usage = [&] {
    return std::pair(scene.pool().usage(PageEncoding::kBf16).num_free,
                     scene.pool().usage(PageEncoding::kInt2).num_free);
  };
  const auto before = usage();
  const std::vector<Member> members = {{first.get(), 1}, {second.get(), 255}};
  const absl::Status status = scene.Begin(members);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("member 1: "));
  EXPECT_THAT(std::string(status.message()), HasSubstr("4 more BF16 pages"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("GpuPagePool::Options::bf16_pages"));
  EXPECT_EQ(usage(), before) << "all or nothing";
  ASSERT_NO_FATAL_FAILURE(scene.Step(first.get(), 1));
  // Until INT2 pages are short.
  ASSERT_NO_FATAL_FAILURE(scene.Step(second.get(), 128));
  ASSERT_NO_FATAL_FAILURE(scene.Step(second.get(), 128));
  const absl::Status full = scene.Begin(std::vector<Member>{{second.get(), 192}});
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  EXPECT_THAT(std::string(full.message()), HasSubstr("INT2 pages"));
  second = nullptr;
  ASSERT_NO_FATAL_FAILURE(scene.Step(first.get(), 190));
  ASSERT_NO_FATAL_FAILURE(scene.ExpectSamePages(*first));
}

TEST_F(GpuBatchTest, AbandonedStepIsAsIfItHadNotBegun) {
  GpuScene scene(FloatOptions());
  const auto lives = Prefilled(&scene, {250, 100});
  const std::vector<Member> members = {{lives[1].get(), 1}, {lives[0].get(), 200}};
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(scene.Begin(members).ok());
    scene.EnqueueRows(members);
    if (i == 1) {
      scene.EnqueueLayers();
    }
    scene.batch().AbandonStep();
    scene.batch().AbandonStep();
    ASSERT_NO_FATAL_FAILURE(scene.ExpectSamePages(*lives[0]));
  }
  ASSERT_NO_FATAL_FAILURE(scene.Step(members));
  ASSERT_NO_FATAL_FAILURE(scene.ExpectSamePages(*lives[0]));
}

TEST_F(GpuBatchTest, SequenceWithNanIsFoundWhenItsPageIsDemotedAndOthersAreNot) {
  GpuScene scene(Options());
  auto lives = Prefilled(&scene, {64, 64});
  scene.spoilt = {.layer = 1, .seed = lives[0]->seed, .position = 70};
  std::vector<Member> members = {{lives[0].get(), 100}, {lives[1].get(), 100}};
  const auto step = [&] {
    ASSERT_TRUE(scene.Begin(members).ok());
    scene.EnqueueRows(members);
    scene.EnqueueLayers();
    ASSERT_TRUE(scene.batch().EndStep(scene.stream()).ok());
    scene.Wait();
  };
  step();
  EXPECT_TRUE(lives[0]->gpu->Validate().ok()) << "its rows are still in BF16";
  step();
  const absl::Status status = lives[0]->gpu->Validate();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("K holds NaN or inf"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("layer 1, KV head 0, token 6"));
  EXPECT_FALSE(scene.batch().Validate().ok());
  EXPECT_TRUE(lives[1]->gpu->Validate().ok()) << lives[1]->gpu->Validate();
  // Its pages are good for others.
  lives[0] = nullptr;
  scene.spoilt = {};
  const auto next = scene.NewLive(40);
  ASSERT_NO_FATAL_FAILURE(scene.Step(next.get(), 250));
  ASSERT_NO_FATAL_FAILURE(scene.Step(next.get(), 100));
  EXPECT_TRUE(next->gpu->Validate().ok());
}

TEST_F(GpuBatchTest, CallsOutOfOrderAreRefusedByName) {
  GpuScene scene(Options());
  GpuScene other(Options());
  const auto lives = Prefilled(&scene, {64, 64});
  const auto stranger = other.NewLive(1);
  GpuBatch& batch = scene.batch();
  const GpuBatch::LayerRows no_rows;
  const auto expect = [](const absl::Status& status, absl::StatusCode code, const char* words) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kOutOfOrder = absl::StatusCode::kFailedPrecondition;
  Live nobody;
  expect(batch.EndStep(scene.stream()), kOutOfOrder, "no step open");
  expect(batch.Layer(0, no_rows, scene.stream()), kOutOfOrder, "no step open");
  expect(scene.Begin({}), kInvalid, "0 members");
  expect(scene.Begin(std::vector<Member>(5, {lives[0].get(), 1})), kInvalid, "5 members");
  expect(scene.Begin(std::vector<Member>{{&nobody, 1}}), kInvalid, "no sequence");
  expect(scene.Begin(std::vector<Member>{{lives[0].get(), 0}}), kInvalid, "no token");
  expect(scene.Begin(std::vector<Member>{{stranger.get(), 1}}), kInvalid, "another pool");
  expect(scene.Begin(std::vector<Member>{{lives[0].get(), 257}}), kInvalid, "257 tokens");
  expect(scene.Begin(std::vector<Member>{{lives[0].get(), 2}, {lives[1].get(), 1}}), kInvalid,
         "member 1: it brings one token after");
  expect(scene.Begin(std::vector<Member>{{lives[0].get(), 1}, {lives[0].get(), 1}}), kOutOfOrder,
         "member 1: its sequence is in a step");
  expect(scene.Begin(std::vector<Member>{{lives[0].get(), 2}}, /*is_replayed=*/true), kInvalid,
         "replayed");
  const std::vector<Member> members = Decoding(lives);
  ASSERT_TRUE(scene.Begin(members).ok());
  expect(scene.Begin(members), kOutOfOrder, "step of 2 members is open");
  expect(batch.Layer(2, no_rows, scene.stream()), kInvalid, "layer 2");
  expect(batch.EndStep(scene.stream()), kOutOfOrder, "layer 0 of 2");
  expect(batch.Layer(0, no_rows, scene.stream()), kInvalid, "queries.data is at address 0");
  scene.EnqueueRows(members);
  scene.EnqueueLayers();
  expect(batch.Layer(1, no_rows, scene.stream()), kOutOfOrder, "enqueued already");
  expect(batch.DecodeLayer(0, 5, no_rows, scene.stream()), kInvalid, "num_rows is 5");
  EXPECT_TRUE(batch.EndStep(scene.stream()).ok());
  expect(lives[0]->gpu->Adopt(std::make_shared<DevicePrefix>(*lives[0]->cpu, 1)), kOutOfOrder,
         "tokens already");
  expect(lives[0]->gpu->RetainTail(65), kInvalid, "multiple of 64");
  const auto little = scene.NewSequence(/*max_tokens=*/1);
  nobody.gpu = scene.NewSequence(/*max_tokens=*/10);
  expect(scene.Begin(std::vector<Member>{{&nobody, 11}}), absl::StatusCode::kResourceExhausted,
         "GpuSequence::Options::max_tokens");
  scene.Wait();
}

TEST_F(GpuBatchTest, OptionsThatCannotBeAreNamed) {
  GpuScene scene(Options());
  const auto expect = [](const absl::Status& status, const char* words) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
  };
  const auto pool = [&](auto change) {
    GpuPagePool::Options options{.profile = Options().profile, .int2_pages = 1, .bf16_pages = 1};
    change(options);
    return GpuPagePool::Create(options).status();
  };
  expect(pool([](auto& o) { o.profile = nullptr; }), "profile is null");
  expect(pool([](auto& o) { o.int2_pages = 0; }), "int2_pages is 0");
  expect(pool([](auto& o) { o.bf16_pages = 0; }), "bf16_pages is 0");
  expect(pool([](auto& o) { o.heads = {1, 2}; }), "heads is [1, 1 + 2)");
  const auto batch = [&](auto change) {
    GpuBatch::Options options{.pool = &scene.pool(), .num_query_heads = 4, .max_sequences = 2};
    change(options);
    return GpuBatch::Create(options).status();
  };
  EXPECT_TRUE(batch([](auto&) {}).ok());
  expect(batch([](auto& o) { o.pool = nullptr; }), "pool is null");
  expect(batch([](auto& o) { o.num_query_heads = 3; }), "num_query_heads is 3");
  expect(batch([](auto& o) { o.num_query_heads = 34; }), "num_query_heads is 34");
  expect(batch([](auto& o) { o.scale = -1; }), "scale is -1");
  expect(batch([](auto& o) { o.max_sequences = 0; }), "max_sequences is 0");
  expect(batch([](auto& o) { o.max_tokens = 1; }), "max_tokens is 1");
  expect(batch([](auto& o) { o.max_tokens = 40'000; }), "max_tokens is 40000");
  expect(batch([](auto& o) { o.max_length = 0; }), "max_length is 0");
  expect(batch([](auto& o) { o.type = ElementType::kFloat32; }), "type is 3");
  expect(batch([](auto& o) { o.out_type = ElementType::kFloat32; }), "out_type is 3");
  expect(batch([](auto& o) {
           o.type = o.out_type = ElementType::kFp16;
           o.max_tokens = 64;
         }),
         "max_tokens is 64");
  expect(GpuSequence::Create({}).status(), "pool is null");
  expect(GpuSequence::Create({.pool = &scene.pool(), .max_tokens = 0}).status(), "max_tokens is 0");
}

TEST_F(GpuBatchTest, PoolIsAsLargeAsItsBatchesNeed) {
  // As many sequences as there are rows, forward by a step of all tokens, at any phase of a page.
  GpuSceneOptions options = Options();
  options.max_sequences = 3;
  options.max_tokens = 130;
  options.bf16_pages = GpuPagePool::Bf16PagesFor(kWindows, 3, 130);
  GpuScene scene(options);
  std::vector<std::unique_ptr<Live>> lives;
  for (uint32_t i = 0; i < 3; ++i) {
    lives.push_back(scene.NewLive(i));
  }
  std::mt19937 random(5);
  for (int step = 0; step < 12; ++step) {
    const auto part = static_cast<uint32_t>(2 + random() % 60);
    const std::vector<Member> members = {
        {lives[0].get(), part}, {lives[1].get(), 60}, {lives[2].get(), 70 - part}};
    ASSERT_NO_FATAL_FAILURE(scene.Step(members));
  }
}

}  // namespace
}  // namespace crumb
