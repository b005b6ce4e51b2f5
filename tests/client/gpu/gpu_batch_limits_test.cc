// SPDX-License-Identifier: Apache-2.0
//
// What a batch refuses, and that it goes on afterwards.
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "crumb/gpu_batch.h"
#include "tests/client/gpu/gpu_batch_fixture.h"
#include "tests/support/test_profile.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;

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
  expect(scene.Begin(std::vector<Member>{{lives[0].get(), 2}}, /*replayed_rows=*/1), kInvalid,
         "replayed");
  expect(scene.Begin(Decoding(lives), /*replayed_rows=*/1), kInvalid, "2 members");
  const std::vector<Member> members = Decoding(lives);
  ASSERT_TRUE(scene.Begin(members).ok());
  expect(scene.Begin(members), kOutOfOrder, "step of 2 members is open");
  expect(batch.Layer(2, no_rows, scene.stream()), kInvalid, "layer 2");
  expect(batch.EndStep(scene.stream()), kOutOfOrder, "layer 0 of 2");
  GpuBatch::LayerRows rows = no_rows;
  const auto refuse = [&](const char* name) {
    expect(batch.Layer(0, rows, scene.stream()), kInvalid,
           (std::string("layer 0: LayerRows::") + name + " is null").c_str());
  };
  alignas(16) std::byte somewhere[16];
  refuse("queries.data");
  rows.queries.data = somewhere;
  refuse("keys.data");
  rows.keys.data = somewhere;
  refuse("values.data");
  rows.values.data = somewhere;
  refuse("out");
  rows.out = somewhere;
  rows.queries.token_stride = 4;
  expect(batch.Layer(0, rows, scene.stream()), kInvalid, "token_stride");
  scene.EnqueueRows(members);
  scene.EnqueueLayers();
  expect(batch.Layer(1, rows, scene.stream()), kOutOfOrder, "enqueued already");
  expect(batch.DecodeLayer(0, 5, rows, scene.stream()), kInvalid, "num_rows is 5");
  expect(batch.DecodeSharedLayer(0, 1, no_rows, scene.stream()), kInvalid, "DecodeSharedLayer of");
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
  const absl::Status ranges = pool([](auto& o) {
    o.profile = MakeTestProfile({.codec = CodecId::kOscarInt2Aware, .narrow_key_ranges = true});
  });
  EXPECT_EQ(ranges.code(), absl::StatusCode::kUnimplemented) << ranges;
  EXPECT_THAT(std::string(ranges.message()),
              AllOf(HasSubstr("oscar-int2-aware"), HasSubstr("--key-ranges codec")));
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
  expect(GpuSequence::Create({}).status(), "pool is null");
  expect(GpuSequence::Create({.pool = &scene.pool(), .max_tokens = 0}).status(), "max_tokens is 0");
}

using GpuBatchDeathTest = GpuBatchTest;

TEST_F(GpuBatchDeathTest, WhatIsStillInUseDoesNotGo) {
  GpuScene scene(Options());
  auto live = scene.NewLive(1);
  ASSERT_TRUE(scene.Begin(std::vector<Member>{{live.get(), 1}}).ok());
  EXPECT_DEATH(live = nullptr, "leaves its step before it goes");
  scene.batch().AbandonStep();
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
