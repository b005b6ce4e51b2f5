// SPDX-License-Identifier: Apache-2.0
//
// Split decode at its limits: bad device data, and more elements than 32 bits can count.
#include <cstring>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "proto/base/bfloat16.h"
#include "tests/cuda/gpu/device_scene.h"

namespace crumb {
namespace {

using testing::HasSubstr;

class SplitDecodeLimitsGpuTest : public GpuFixture<testing::Test> {};

TEST_F(SplitDecodeLimitsGpuTest, NullPageIsLeftOutAndNamed) {
  const DecodeScene scene({.group = 4, .lengths = {{3, 65}, {3, 65}}});
  DecodeScene shorter({.group = 4, .lengths = {{3, 65}, {2, 65}}});
  DeviceScene device(scene);
  auto table = scene.HistoryTable(reinterpret_cast<const std::byte*>(
      device.history().Download()[0] - scene.HistoryTable(nullptr)[0]));
  table.back() = nullptr;  // The last page of sequence 1.
  device.history().Upload(table);
  const auto with_null = device.Run();
  const absl::Status status = TakeSplitDecodeProblem(device.params(), nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("null page within history_pages"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("is 1"));
  EXPECT_TRUE(TakeSplitDecodeProblem(device.params(), nullptr).ok()) << "it was taken out";
  device.history_pages().Upload({3, 2});
  const auto without = device.Run();
  EXPECT_LT(WorstError(with_null.out, without.out), 1e-6);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(SplitDecodeLimitsGpuTest, LengthsBeyondTheTableAreCutAndNamed) {
  const DecodeScene scene({.group = 2, .lengths = {{2, 64}, {3, 128}}});
  DeviceScene device(scene);
  const auto expected = device.Run();
  device.history_pages().Upload({2, 4000000000u});
  device.window_tokens().Upload({64, 4000000000u});
  const auto got = device.Run();
  EXPECT_LT(WorstError(got.out, expected.out), 1e-6);
  const absl::Status status = TakeSplitDecodeProblem(device.params(), nullptr);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("history_pages beyond the table's stride of 3"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("window_tokens beyond"));
}

TEST_F(SplitDecodeLimitsGpuTest, SmallWorkspaceIsRefusedAndLaunchErrorsDoNotStick) {
  const DecodeScene scene({.group = 2, .lengths = {{2, 64}}});
  DeviceScene device(scene);
  device.params().workspace_bytes = 4096;
  const absl::Status status = SplitDecode(device.params(), nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("workspace_bytes is 4096"));
  device.params().workspace_bytes = 1u << 30;
  const absl::Status refused = gpu::SplitDecodeOnGrid(device.params(), {132, 64, 2, 1, 2}, nullptr);
  EXPECT_EQ(refused.code(), absl::StatusCode::kInternal) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("launching split_decode"));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_LT(WorstError(device.Run().out, scene.Expected().out), 1e-4);
}

size_t FreeBytes() {
  size_t available = 0;
  size_t total = 0;
  CRUMB_EXPECT_CUDA(cudaMemGetInfo(&available, &total));
  return available;
}

// Tables of more than 2^31 entries, and head blocks more than 2^31 bytes from one another.
TEST_F(SplitDecodeLimitsGpuTest, TablesAndPagesBeyond31Bits) {
  constexpr uint32_t kStride = 1u << 28;
  constexpr uint32_t kSequences = 9;
  constexpr size_t kHeadStride = (size_t{5} << 30) / 2;  // 2.5 GiB: heads lie up to 5 GiB apart.
  if (FreeBytes() < (size_t{40} << 30)) {
    GTEST_SKIP() << "needs 40 GiB of free device memory";
  }
  SceneShape shape{.head_dim = 64, .num_kv_heads = 3, .group = 2};
  shape.lengths.assign(kSequences, SceneLength{2, 0});
  const DecodeScene scene(shape);
  DeviceScene device(scene);
  const auto expected = device.Run();

  // The same pages, with the run of each head moved far from the others.
  const size_t block = scene.geometry().HeadBlockBytes(PageEncoding::kInt2);
  const size_t near_stride = scene.geometry().HeadRangeBytes(PageEncoding::kInt2);
  DeviceBuffer<std::byte> arena(2 * kHeadStride + kSequences * 2 * block);
  DeviceBuffer<const std::byte*> table(size_t{kStride} * kSequences);
  const auto near_table = scene.HistoryTable(scene.int2_arena().data());
  for (size_t page = 0; page < near_table.size(); ++page) {
    for (size_t head = 0; head < 3; ++head) {
      CRUMB_EXPECT_CUDA(cudaMemcpy(arena.data() + head * kHeadStride + page * block,
                                   near_table[page] + block + head * near_stride, block,
                                   cudaMemcpyHostToDevice));
    }
    const std::byte* image = arena.data() + page * block;
    const size_t entry = page / 2 * kStride + page % 2;
    CRUMB_EXPECT_CUDA(
        cudaMemcpy(table.data() + entry, &image, sizeof(image), cudaMemcpyHostToDevice));
  }
  device.params().history = {table.data(), kStride, 0, kHeadStride};
  const auto got = device.Run();
  EXPECT_EQ(std::memcmp(got.out.data(), expected.out.data(), got.out.size() * sizeof(float)), 0);
}

// More than 2^31 elements of queries and outputs.
TEST_F(SplitDecodeLimitsGpuTest, QueriesAndOutputsBeyond31Bits) {
  constexpr uint32_t kSequences = 131073;
  constexpr uint32_t kHeads = 64;
  constexpr size_t kRows = size_t{kSequences} * kHeads;
  static_assert(kRows * 256 > size_t{1} << 31);
  if (FreeBytes() < (size_t{20} << 30)) {
    GTEST_SKIP() << "needs 20 GiB of free device memory";
  }
  SceneShape shape{.head_dim = 256, .num_kv_heads = 4, .group = 16, .lengths = {{0, 9}}};
  const DecodeScene scene(shape);
  DeviceScene device(scene);
  const auto expected = device.Run();

  // Only the first and the last sequences have tokens: all the same ones.
  DeviceBuffer<uint16_t> queries(kRows * 256);
  DeviceBuffer<uint16_t> out(kRows * 256);
  DeviceBuffer<const std::byte*> table(kSequences);
  DeviceBuffer<uint32_t> tokens(kSequences);
  tokens.Fill(0);
  const std::byte* image = nullptr;
  CRUMB_EXPECT_CUDA(cudaMemcpy(&image, device.params().windows.pages, 8, cudaMemcpyDeviceToHost));
  for (const size_t sequence : {size_t{0}, size_t{kSequences} - 1}) {
    const uint32_t nine = 9;
    CRUMB_EXPECT_CUDA(cudaMemcpy(table.data() + sequence, &image, 8, cudaMemcpyHostToDevice));
    CRUMB_EXPECT_CUDA(cudaMemcpy(tokens.data() + sequence, &nine, 4, cudaMemcpyHostToDevice));
    CRUMB_EXPECT_CUDA(cudaMemcpy(queries.data() + sequence * kHeads * 256, scene.queries().data(),
                                 size_t{kHeads} * 512, cudaMemcpyHostToDevice));
  }
  SplitDecodeParams params = device.params();
  params.num_sequences = kSequences;
  params.queries = queries.data();
  params.out = out.data();
  params.out_type = ElementType::kBf16;
  params.lse = nullptr;
  params.windows.pages = table.data();
  params.window_tokens = tokens.data();
  ASSERT_TRUE(SplitDecode(params, nullptr).ok());
  CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
  std::vector<uint16_t> got(size_t{kHeads} * 256);
  for (const size_t sequence : {size_t{0}, size_t{kSequences} / 2, size_t{kSequences} - 1}) {
    CRUMB_EXPECT_CUDA(cudaMemcpy(got.data(), out.data() + sequence * kHeads * 256, got.size() * 2,
                                 cudaMemcpyDeviceToHost));
    const bool is_empty = sequence == kSequences / 2;
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(got[i], is_empty ? 0 : BFloat16::FromFloat(expected.out[i]).bits) << sequence;
    }
  }
}

}  // namespace
}  // namespace crumb
