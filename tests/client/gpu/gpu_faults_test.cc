// SPDX-License-Identifier: Apache-2.0
//
// Any call to the device may fail at any time: a status, nothing is lost or kept, and the next
// attempt gives what it would have given. On the pretended GPU.
#include <memory>
#include <vector>

#include "gtest/gtest.h"

#include "crumb/gpu_batch.h"
#include "proto/base/status_macros.h"
#include "tests/client/gpu/gpu_batch_fixture.h"
#include "tests/client/sequence/sequence_testing.h"
#include "tests/support/fake_gpu.h"

namespace crumb {
namespace {

class GpuFaultsTest : public GpuBatchTest {
 protected:
  static void ExpectRefused(const absl::Status& status) {
    EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
  }
};

TEST_F(GpuFaultsTest, PoolsAndBatchesThatCannotBeMadeLeaveNothingBehind) {
  const size_t before = FakeGpu::allocated_bytes();
  const auto make = [&] {
    std::unique_ptr<GpuPagePool> pool;
    auto made = GpuPagePool::Create({.profile = Options().profile,
                                     .int2_pages = 2,
                                     .bf16_pages = 3,
                                     .keeps_outputs_rotated = false});
    CRUMB_RETURN_IF_ERROR(made.status());
    pool = *std::move(made);
    return GpuBatch::Create({.pool = pool.get(), .num_query_heads = 4, .max_sequences = 2})
        .status();
  };
  const uint64_t num_calls = FakeGpu::FailEachCall(make, [&](const absl::Status& status) {
    ExpectRefused(status);
    EXPECT_EQ(FakeGpu::allocated_bytes(), before) << status;
    EXPECT_EQ(FakeGpu::num_waiting(), 0u) << status;
  });
  EXPECT_GT(num_calls, 15u);
}

// A token of one sequence and a chunk of another, whose pages leave its window, with any of the
// step's calls failing: begun anew, outputs and pages are the CPU's.
TEST_F(GpuFaultsTest, StepThatFailsAnywhereCanBeBegunAnew) {
  GpuScene scene(FloatOptions());
  uint64_t num_failed = 0;
  for (bool has_failed = true; has_failed; ++num_failed) {
    const auto lives = Prefilled(&scene, {30, 200});
    const std::vector<Member> members = {{lives[0].get(), 1}, {lives[1].get(), 70}};
    scene.EnqueueRows(members);
    const GpuPagePool::Usage before = scene.pool().usage(PageEncoding::kBf16);
    FakeGpu::FailCall(num_failed);
    const absl::Status status = [&] {
      CRUMB_RETURN_IF_ERROR(scene.Begin(members));
      CRUMB_RETURN_IF_ERROR(scene.TryLayers());
      return scene.batch().EndStep(scene.stream());
    }();
    has_failed = FakeGpu::TakeFailed();
    ASSERT_EQ(status.ok(), !has_failed) << status;
    ExpectRefused(status);
    if (has_failed) {
      SCOPED_TRACE(status);
      scene.batch().AbandonStep();
      EXPECT_EQ(scene.pool().usage(PageEncoding::kBf16).num_free, before.num_free);
      ASSERT_NO_FATAL_FAILURE(scene.Step(members));
      ASSERT_NO_FATAL_FAILURE(scene.ExpectSamePages(*lives[1]));
    }
  }
  EXPECT_GT(num_failed, 15u);
}

// The same where a prefix's pages must be demoted before the step's rows are read.
TEST_F(GpuFaultsTest, FirstStepOnAPrefixInBf16CanBeBegunAnew) {
  GpuScene scene(FloatOptions());
  const auto publisher = scene.NewLive(9);
  ASSERT_TRUE(publisher->cpu->RetainTail(192).ok());
  ASSERT_NO_FATAL_FAILURE(scene.Step(publisher.get(), 250));
  ASSERT_NO_FATAL_FAILURE(scene.Step(publisher.get(), 250));
  const std::shared_ptr<const Profile> profile(&scene.pool().profile(), [](const Profile*) {});
  uint64_t num_failed = 0;
  for (bool has_failed = true; has_failed; ++num_failed) {
    const auto prefix = std::make_shared<DevicePrefix>(*publisher->cpu, 5);
    prefix->Drop(PageIdx(1), PageEncoding::kInt2);
    prefix->Drop(PageIdx(2), PageEncoding::kInt2);
    const auto reader = scene.NewLive(71);
    ASSERT_TRUE(reader->gpu->Adopt(prefix).ok());
    ASSERT_TRUE(reader->cpu->Adopt(FakePrefix::Of(*publisher->cpu, profile, 5)).ok());
    const std::vector<Member> members = {{reader.get(), 90}};
    FakeGpu::FailCall(num_failed);
    const absl::Status status = scene.Begin(members);
    has_failed = FakeGpu::TakeFailed();
    ASSERT_EQ(status.ok(), !has_failed) << status;
    scene.batch().AbandonStep();
    SCOPED_TRACE(status);
    ASSERT_NO_FATAL_FAILURE(scene.Step(members));
    ASSERT_NO_FATAL_FAILURE(scene.Step(reader.get(), 70));
  }
  EXPECT_GT(num_failed, 8u);
}

}  // namespace
}  // namespace crumb
