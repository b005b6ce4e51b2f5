// SPDX-License-Identifier: Apache-2.0
//
// A device that has no memory left. Needs a GPU.
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/client/gpu/gpu_batch_fixture.h"
#include "tests/cuda/gpu/device_buffer.h"

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

}  // namespace
}  // namespace crumb
