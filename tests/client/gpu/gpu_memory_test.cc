// SPDX-License-Identifier: Apache-2.0
//
// Batches on a device that has no memory left, and on a machine of two. Needs a GPU.
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/client/gpu/gpu_batch_fixture.h"
#include "tests/cuda/gpu/device_buffer.h"
#include "tests/cuda/gpu/two_gpu_fixture.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST_F(GpuBatchTest, DeviceOutOfMemoryIsAStatusWithTheBytesAndLeavesNothingBehind) {
  GpuScene scene(Options());
  const auto live = scene.NewLive(1);
  ASSERT_NO_FATAL_FAILURE(scene.Step(live.get(), 100));
  const auto expect_exhausted = [](const absl::Status& status, const auto& words) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(std::string(status.message()), words);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  };
  // 50 TB each.
  constexpr uint32_t kPages = 4'000'000'000u;
  const GpuPagePool::Options one{.profile = Options().profile, .int2_pages = 1, .bf16_pages = 1};
  GpuPagePool::Options options = one;
  options.int2_pages = kPages;
  expect_exhausted(GpuPagePool::Create(options).status(),
                   AllOf(HasSubstr("a pool of 4000000000 pages"), HasSubstr("on GPU 0"),
                         HasSubstr("lower GpuPagePool::Options::int2_pages")));
  options = one;
  options.bf16_pages = kPages;
  expect_exhausted(GpuPagePool::Create(options).status(),
                   HasSubstr("lower GpuPagePool::Options::bf16_pages"));
  // Tables of 4 PB.
  expect_exhausted(GpuBatch::Create({.pool = &scene.pool(),
                                     .num_query_heads = 4,
                                     .max_sequences = 32'768,
                                     .max_length = 1u << 30})
                       .status(),
                   HasSubstr("bytes"));
  ASSERT_NO_FATAL_FAILURE(scene.Step(live.get(), 1)) << "others go on";
}

using TwoGpuBatchTest = TwoGpuFixture<GpuBatchTest>;

// The engine's own device stays the current one.
TEST_F(TwoGpuBatchTest, PoolOnAnotherGpuThanTheCurrentOneIsTheCpusToo) {
  GpuSceneOptions options = FloatOptions();
  options.gpu = 1;
  GpuScene scene(options);
  const auto live = scene.NewLive(3);
  for (const uint32_t tokens : {200u, 1u, 70u, 1u}) {
    ASSERT_NO_FATAL_FAILURE(scene.Step(live.get(), tokens));
  }
  ASSERT_NO_FATAL_FAILURE(scene.ExpectSamePages(*live));
  int current = -1;
  CRUMB_EXPECT_CUDA(cudaGetDevice(&current));
  EXPECT_EQ(current, 0);
}

TEST_F(TwoGpuBatchTest, StreamOfAnotherGpuIsRefusedInEveryCallAndTheNextStepIsFine) {
  CRUMB_EXPECT_CUDA(cudaSetDevice(1));
  const TestStream other;
  CRUMB_EXPECT_CUDA(cudaSetDevice(0));
  GpuScene scene(Options());
  const auto lives = Prefilled(&scene, {30, 200});
  const std::vector<Member> members = {{lives[0].get(), 1}, {lives[1].get(), 70}};
  const std::vector<GpuBatch::Member> of_batch = {{lives[0]->gpu.get(), 1},
                                                  {lives[1]->gpu.get(), 70}};
  const auto expect_refused = [](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("the stream is of GPU 1 and the current GPU is 0"));
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  };
  expect_refused(scene.batch().BeginStep({.members = of_batch}, other.get()));
  other.Wait();
  scene.EnqueueRows(members);
  ASSERT_TRUE(scene.Begin(members).ok());
  expect_refused(scene.TryLayers(other.get()));
  scene.EnqueueLayers();
  expect_refused(scene.batch().EndStep(other.get()));
  other.Wait();
  expect_refused(scene.batch().TakeProblem(other.get()));
  scene.batch().AbandonStep();
  ASSERT_NO_FATAL_FAILURE(scene.Step(members));
}

}  // namespace
}  // namespace crumb
