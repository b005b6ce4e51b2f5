// SPDX-License-Identifier: Apache-2.0
//
// append_rows, prefill attention and shared decode where offsets do not fit 31 bits (those of the
// other ops are with their tests). Needs a GPU with much free memory.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "gtest/gtest.h"

#include "crumb/cuda/append_rows.h"
#include "crumb/cuda/prefill_attention.h"
#include "crumb/cuda/shared_decode.h"
#include "tests/cuda/gpu/device_buffer.h"
#include "tests/cuda/gpu/device_scene.h"
#include "tests/cuda/gpu/gpu_fixture.h"
#include "tests/cuda/gpu/page_scene.h"
#include "tests/cuda/gpu/prefill_scene.h"

namespace crumb {
namespace {

constexpr size_t kFar = (size_t{5} << 30) / 2;  // Bytes.

class Beyond31BitsGpuTest : public GpuFixture<testing::Test> {
 protected:
  static bool HasFree(size_t gib) {
    size_t available = 0;
    size_t total = 0;
    CRUMB_EXPECT_CUDA(cudaMemGetInfo(&available, &total));
    return available >= gib << 30;
  }
  template <typename T>
  static std::vector<T> Read(const T* from, size_t count) {
    std::vector<T> values(count);
    CRUMB_EXPECT_CUDA(cudaMemcpy(values.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }
  template <typename T>
  static void Write(T* to, const std::vector<T>& values) {
    CRUMB_EXPECT_CUDA(
        cudaMemcpy(to, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  // Fills a large buffer with the same elements again and again.
  static void Repeat(const std::vector<uint16_t>& values, DeviceBuffer<uint16_t>* to) {
    Write(to->data(), values);
    for (size_t done = values.size(); done < to->size(); done *= 2) {
      CRUMB_EXPECT_CUDA(cudaMemcpy(to->data() + done, to->data(),
                                   std::min(done, to->size() - done) * sizeof(uint16_t),
                                   cudaMemcpyDeviceToDevice));
    }
  }
  static std::vector<uint16_t> Bits(const std::vector<BFloat16>& rows) {
    std::vector<uint16_t> bits(rows.size());
    std::memcpy(bits.data(), rows.data(), bits.size() * sizeof(uint16_t));
    return bits;
  }
  // INT2 or BF16 head blocks of layer 1 in images of two layers, moved to a place where heads lie
  // kFar apart: [page] at image, and head h at h * kFar after it.
  static std::vector<const std::byte*> MoveApart(const Geometry& geometry,
                                                 PageEncoding encoding,
                                                 const std::vector<const std::byte*>& images,
                                                 std::byte* to) {
    std::vector<const std::byte*> moved;
    const size_t block = geometry.HeadBlockBytes(encoding);
    for (const std::byte* image : images) {
      for (uint32_t head = 0; head < geometry.num_kv_heads; ++head) {
        CRUMB_EXPECT_CUDA(cudaMemcpy(to + head * kFar,
                                     image + geometry.HeadBlockOffset(encoding, 1, head), block,
                                     cudaMemcpyDefault));
      }
      moved.push_back(to);
      to += block;
    }
    return moved;
  }
};

// Rows of tokens, tables, pages, and results: each beyond 2^31 of its elements.
TEST_F(Beyond31BitsGpuTest, AppendRows) {
  constexpr uint32_t kDim = 256;
  constexpr uint32_t kTokens = 1u << 15;
  constexpr uint32_t kKvHeads = 8;
  constexpr uint32_t kGroup = 64;
  constexpr size_t kQueries = size_t{kTokens} * kKvHeads * kGroup * kDim;
  constexpr size_t kHeadStride = size_t{1} << 29;
  static_assert(kQueries > size_t{1} << 31);
  constexpr uint32_t kStride = 1u << 25;
  constexpr uint32_t kSequences = 65;
  if (!HasFree(40)) {
    GTEST_SKIP() << "needs 40 GiB of free device memory";
  }
  const PageScene scene({2, kKvHeads, kDim, kDim}, CodecId::kOscarInt2, 1);
  const auto profile = *DeviceProfile::Create(scene.geometry(), scene.heads());
  const std::vector<uint16_t> row =
      Bits(GaussianRows(size_t{kKvHeads} * (kGroup + 2) * kDim, 1, 3));
  // Two tokens' rows, far apart; the second's alone are random.
  DeviceBuffer<std::byte> rows(kFar + row.size() * sizeof(uint16_t));
  rows.Fill(0);
  CRUMB_EXPECT_CUDA(cudaMemcpy(rows.data() + kFar, row.data(), row.size() * sizeof(uint16_t),
                               cudaMemcpyHostToDevice));
  DeviceBuffer<std::byte> page(kHeadStride * kKvHeads);
  page.Fill(0);
  DeviceBuffer<std::byte*> table(size_t{kSequences} * kStride);
  Write(table.data() + table.size() - 1, std::vector<std::byte*>{page.data()});
  DeviceBuffer<uint16_t> queries(kQueries);
  DeviceBuffer<uint64_t> left_out(std::vector<uint64_t>{0});

  AppendRowsParams params;
  params.heads = profile->heads();
  params.layer = 1;
  params.num_kv_heads = kKvHeads;
  params.num_query_heads = kKvHeads * kGroup;
  params.num_tokens = 2;
  params.queries = {rows.data(), kFar};
  params.keys = {rows.data() + size_t{kKvHeads} * kGroup * kDim * 2, kFar};
  params.values = {rows.data() + size_t{kKvHeads} * (kGroup + 1) * kDim * 2, kFar};
  params.rotated_queries = queries.data();
  params.pages = table.data();
  params.num_sequences = kSequences;
  params.stride = kStride;
  params.head_stride = kHeadStride;
  const DeviceBuffer<uint32_t> sequences(std::vector<uint32_t>{0, kSequences - 1});
  const DeviceBuffer<uint32_t> slots(
      std::vector<uint32_t>{AppendRowsParams::kNoSlot, kStride * kPageTokens - 1});
  params.sequences = sequences.data();
  params.slots = slots.data();
  params.tokens_left_out = left_out.data();
  ASSERT_TRUE(AppendRows(params, nullptr).ok());
  const absl::Status status = TakeAppendRowsProblem(params, nullptr);
  ASSERT_TRUE(status.ok()) << status;

  // By the twin, from near rows to a near page.
  std::vector<std::byte> near_page(scene.bf16_bytes());
  std::vector<uint16_t> expected(size_t{kKvHeads} * kGroup * kDim);
  AppendRowsParams near = params;
  const auto* const near_rows = reinterpret_cast<const std::byte*>(row.data());
  std::byte* const image = near_page.data();
  const uint32_t slot = kPageTokens - 1;
  uint64_t near_left_out = 0;
  near.num_tokens = 1;
  near.queries.data = near_rows;
  near.keys.data = near_rows + size_t{kKvHeads} * kGroup * kDim * 2;
  near.values.data = near_rows + size_t{kKvHeads} * (kGroup + 1) * kDim * 2;
  near.rotated_queries = expected.data();
  near.pages = &image;
  near.num_sequences = near.stride = 1;
  near.head_stride = scene.geometry().HeadBlockBytes(PageEncoding::kBf16);
  near.sequences = nullptr;
  near.slots = &slot;
  near.tokens_left_out = &near_left_out;
  ASSERT_TRUE(AppendRowsReference(near, scene.heads()).ok());
  const auto expect_near = [](const uint16_t* got, const uint16_t* wanted, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      const float a = BFloat16{got[i]}.ToFloat();
      const float b = BFloat16{wanted[i]}.ToFloat();
      ASSERT_LE(std::fabs(a - b), std::fabs(b) / 128 + 3e-4f) << "element " << i;
    }
  };
  const Bf16HeadBlock format{kDim, kDim};
  for (uint32_t head = 0; head < kKvHeads; ++head) {
    for (const size_t offset : {format.key_offset(), format.value_offset()}) {
      const size_t at = offset + size_t{slot} * kDim * 2;
      const auto got =
          Read(reinterpret_cast<const uint16_t*>(page.data() + head * kHeadStride + at), kDim);
      expect_near(
          got.data(),
          reinterpret_cast<const uint16_t*>(near_page.data() + head * near.head_stride + at), kDim);
    }
  }

  // Queries of so many tokens that their results are beyond: all of the second's row.
  params.num_tokens = kTokens;
  params.queries = {rows.data() + kFar, 0};
  params.keys = params.values = {};
  ASSERT_TRUE(AppendRows(params, nullptr).ok());
  CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
  for (const uint32_t token : {0u, kTokens / 2, kTokens - 1}) {
    const auto got = Read(queries.data() + size_t{token} * expected.size(), expected.size());
    expect_near(got.data(), expected.data(), expected.size());
  }
}

TEST_F(Beyond31BitsGpuTest, PrefillAttentionOverHeadsFarApart) {
  if (!HasFree(12)) {
    GTEST_SKIP() << "needs 12 GiB of free device memory";
  }
  for (const uint32_t dim : {64u, 128u, 256u}) {
    const PrefillScene scene(
        {.dim = dim, .history_pages = 3, .window_tokens = 100, .num_queries = 40});
    const Geometry geometry{2, scene.shape().num_kv_heads, dim, dim};
    const DeviceBuffer<std::byte> int2(scene.int2());
    const DeviceBuffer<BFloat16> windows(scene.windows());
    const DeviceBuffer<uint16_t> queries(scene.queries());
    const auto history_images = scene.HistoryTable(int2.data());
    const auto window_images = scene.WindowTable(windows.data());
    const DeviceBuffer<const std::byte*> near_history(history_images);
    const DeviceBuffer<const std::byte*> near_windows(window_images);
    const DeviceBuffer<float> out(scene.num_rows() * dim);
    PrefillAttentionParams params =
        scene.Params(queries.data(), near_history.data(), near_windows.data(), out.data(), nullptr);
    ASSERT_TRUE(PrefillAttention(params, nullptr).ok());
    CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
    const std::vector<float> expected = out.Download();

    const size_t room = kFar + (size_t{1} << 24);
    DeviceBuffer<std::byte> far_int2(room);
    DeviceBuffer<std::byte> far_windows(room);
    const DeviceBuffer<const std::byte*> history(
        MoveApart(geometry, PageEncoding::kInt2, history_images, far_int2.data()));
    const DeviceBuffer<const std::byte*> far_window_table(
        MoveApart(geometry, PageEncoding::kBf16, window_images, far_windows.data()));
    params.history.pages = history.data();
    params.windows.pages = far_window_table.data();
    params.history.block_offset = params.windows.block_offset = 0;
    params.history.head_stride = params.windows.head_stride = kFar;
    ASSERT_TRUE(PrefillAttention(params, nullptr).ok());
    CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
    EXPECT_TRUE(out.Download() == expected) << dim;
  }
}

// Queries and outputs of more than 2^31 elements: the last token's are those of a launch of its
// own.
TEST_F(Beyond31BitsGpuTest, PrefillAttentionOfManyQueries) {
  constexpr uint32_t kTokens = 4200;
  constexpr uint32_t kKvHeads = 64;
  constexpr uint32_t kGroup = 64;
  if (!HasFree(30)) {
    GTEST_SKIP() << "needs 30 GiB of free device memory";
  }
  for (const uint32_t dim : {128u, 256u}) {
    const size_t row = size_t{kKvHeads} * kGroup * dim;
    const uint32_t num_queries = dim == 128 ? kTokens : kTokens / 2;
    ASSERT_GT(num_queries * row, size_t{1} << 31);
    const uint32_t num_pages = (num_queries + kPageTokens - 1) / kPageTokens;
    const Geometry geometry{1, kKvHeads, dim, dim};
    DeviceBuffer<uint16_t> windows(num_pages * geometry.PageBytes(PageEncoding::kBf16) / 2);
    DeviceBuffer<uint16_t> queries(num_queries * row);
    // Of odd lengths, so that no two rows are alike for long.
    Repeat(Bits(GaussianRows(1'000'003, 1, 5)), &windows);
    Repeat(Bits(GaussianRows(1'299'709, 1, 6)), &queries);
    DeviceBuffer<uint16_t> out(num_queries * row);
    std::vector<const std::byte*> images;
    for (uint32_t page = 0; page < num_pages; ++page) {
      images.push_back(reinterpret_cast<const std::byte*>(windows.data()) +
                       page * geometry.PageBytes(PageEncoding::kBf16));
    }
    const DeviceBuffer<const std::byte*> table(images);
    PrefillAttentionParams params;
    params.num_queries = num_queries;
    params.num_query_heads = kKvHeads * kGroup;
    params.num_kv_heads = kKvHeads;
    params.head_dim = dim;
    params.scale = 0.1f;
    params.queries = queries.data();
    params.out = out.data();
    params.windows = {table.data(), num_pages, 0, geometry.HeadRangeBytes(PageEncoding::kBf16)};
    params.window_tokens = num_queries;
    ASSERT_TRUE(PrefillAttention(params, nullptr).ok());
    CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
    const DeviceBuffer<uint16_t> last(row);
    PrefillAttentionParams one = params;
    one.num_queries = 1;
    one.queries = queries.data() + (num_queries - 1) * row;
    one.out = last.data();
    ASSERT_TRUE(PrefillAttention(one, nullptr).ok());
    CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
    const std::vector<uint16_t> expected = last.Download();
    const std::vector<uint16_t> got = Read(out.data() + (num_queries - 1) * row, row);
    for (size_t i = 0; i < row; ++i) {
      ASSERT_NEAR(BFloat16{got[i]}.ToFloat(), BFloat16{expected[i]}.ToFloat(), 5e-3f)
          << "element " << i << " of head_dim " << dim;
    }
  }
}

TEST_F(Beyond31BitsGpuTest, SharedDecodeOverHeadsFarApart) {
  if (const auto device = CurrentGpu(); device->major != 9) {
    GTEST_SKIP() << device->name << " is not of compute capability 9.0";
  }
  if (!HasFree(12)) {
    GTEST_SKIP() << "needs 12 GiB of free device memory";
  }
  for (const uint32_t dim : {64u, 128u, 256u}) {
    const DecodeScene scene(
        {.head_dim = dim, .num_kv_heads = 2, .group = 4, .lengths = {{4, 0}, {0, 9}}});
    DeviceScene device(scene);
    SharedDecodeParams params{
        .batch = device.params(), .prefix = device.params().history, .prefix_pages = nullptr};
    const DeviceBuffer<uint32_t> prefix_pages(std::vector<uint32_t>{4});
    const DeviceBuffer<uint32_t> none(std::vector<uint32_t>{0, 0});
    params.prefix_pages = prefix_pages.data();
    params.batch.history_pages = none.data();
    DeviceBuffer<std::byte> workspace(SharedDecodeWorkspaceBytes(params).value_or(0));
    workspace.Fill(0);
    params.batch.workspace = workspace.data();
    params.batch.workspace_bytes = workspace.size();
    const auto run = [&] {
      device.SpoilOutputs();
      EXPECT_TRUE(SharedDecode(params, nullptr).ok());
      CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
      return device.Download();
    };
    const DecodeScene::Result expected = run();
    DeviceBuffer<std::byte> far(kFar + (size_t{1} << 24));
    std::vector<const std::byte*> images = device.history().Download();
    images.resize(4);
    const DeviceBuffer<const std::byte*> table(
        MoveApart(scene.geometry(), PageEncoding::kInt2, images, far.data()));
    params.prefix = {table.data(), 4, 0, kFar};
    params.batch.history = params.prefix;
    params.batch.history.stride = 2;
    const DecodeScene::Result got = run();
    EXPECT_TRUE(got.out == expected.out && got.lse == expected.lse) << dim;
  }
}

// Queries, outputs and what the launches hand to one another: the last sequence has those of a
// launch of its own.
TEST_F(Beyond31BitsGpuTest, SharedDecodeOfManySequences) {
  constexpr uint32_t kDim = 256;
  constexpr uint32_t kSequences = 70'000;
  if (const auto device = CurrentGpu(); device->major != 9) {
    GTEST_SKIP() << device->name << " is not of compute capability 9.0";
  }
  if (!HasFree(60)) {
    GTEST_SKIP() << "needs 60 GiB of free device memory";
  }
  const DecodeScene scene({.head_dim = kDim, .num_kv_heads = 8, .group = 16, .lengths = {{2, 0}}});
  DeviceScene device(scene);
  const size_t row = size_t{scene.num_query_heads()} * kDim;
  ASSERT_GT(kSequences * row, size_t{1} << 31);
  DeviceBuffer<uint16_t> queries(kSequences * row);
  Repeat(Bits(GaussianRows(1'299'709, 1, 6)), &queries);
  DeviceBuffer<uint16_t> out(kSequences * row);
  const DeviceBuffer<uint32_t> prefix_pages(std::vector<uint32_t>{2});
  SharedDecodeParams params{.batch = device.params(),
                            .prefix = device.params().history,
                            .prefix_pages = prefix_pages.data()};
  params.batch.history = params.batch.windows = {};
  params.batch.lse = nullptr;
  params.batch.out_type = ElementType::kBf16;
  const auto run = [&](uint32_t num_sequences, const uint16_t* from, uint16_t* to) {
    params.batch.num_sequences = num_sequences;
    params.batch.queries = from;
    params.batch.out = to;
    const auto bytes = SharedDecodeWorkspaceBytes(params);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    DeviceBuffer<std::byte> workspace(*bytes);
    workspace.Fill(0);
    params.batch.workspace = workspace.data();
    params.batch.workspace_bytes = workspace.size();
    const absl::Status status = SharedDecode(params, nullptr);
    ASSERT_TRUE(status.ok()) << status;
    CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
  };
  run(kSequences, queries.data(), out.data());
  const std::vector<uint16_t> got = Read(out.data() + (kSequences - 1) * row, row);
  const DeviceBuffer<uint16_t> last(row);
  run(1, queries.data() + (kSequences - 1) * row, last.data());
  const std::vector<uint16_t> expected = last.Download();
  for (size_t i = 0; i < row; ++i) {
    ASSERT_NEAR(BFloat16{got[i]}.ToFloat(), BFloat16{expected[i]}.ToFloat(), 2e-2f) << i;
  }
}

}  // namespace
}  // namespace crumb
