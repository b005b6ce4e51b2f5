// SPDX-License-Identifier: Apache-2.0
//
// append_rows on the GPU against the twin.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/cuda/gpu/append_scene.h"
#include "tests/cuda/gpu/device_buffer.h"
#include "tests/cuda/gpu/gpu_fixture.h"

namespace crumb {
namespace {

using testing::HasSubstr;

constexpr std::byte kUntouched{0xee};

struct Result {
  std::vector<std::byte> windows;
  std::vector<uint16_t> queries;
};

class DeviceAppend {
 public:
  explicit DeviceAppend(AppendScene& scene)
      : scene_(scene),
        windows_(scene.pages().num_pages() * scene.pages().bf16_bytes()),
        table_(scene.pages().Table(windows_.data(), scene.pages().bf16_bytes())),
        rows_(scene.rows()),
        queries_(scene.query_elements()),
        sequences_(scene.sequences()),
        slots_(scene.slots()),
        left_out_(std::vector<uint64_t>{0}) {
    auto profile = DeviceProfile::Create(scene.pages().geometry(), scene.pages().heads());
    EXPECT_TRUE(profile.ok()) << profile.status();
    profile_ = *std::move(profile);
  }

  AppendRowsParams Params(uint32_t layer) const {
    AppendRowsParams params = scene_.Params(layer, rows_.data(), queries_.data(), table_.data(),
                                            sequences_.data(), slots_.data());
    params.heads = profile_->heads();
    params.tokens_left_out = left_out_.data();
    return params;
  }
  DeviceBuffer<std::byte*>& table() { return table_; }

  void Clear() {
    windows_.Fill(static_cast<int>(kUntouched));
    queries_.Fill(0xff);
  }
  Result Download() { return {windows_.Download(), queries_.Download()}; }
  Result Run(uint32_t layer) {
    Clear();
    const absl::Status status = AppendRows(Params(layer), nullptr);
    EXPECT_TRUE(status.ok()) << status;
    CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
    return Download();
  }

 private:
  AppendScene& scene_;
  DeviceBuffer<std::byte> windows_;
  DeviceBuffer<std::byte*> table_;
  DeviceBuffer<uint16_t> rows_;
  DeviceBuffer<uint16_t> queries_;
  DeviceBuffer<uint32_t> sequences_;
  DeviceBuffer<uint32_t> slots_;
  DeviceBuffer<uint64_t> left_out_;
  std::unique_ptr<DeviceProfile> profile_;
};

Result Reference(AppendScene& scene, uint32_t layer, absl::Status* status) {
  Result result;
  result.windows.assign(scene.pages().num_pages() * scene.pages().bf16_bytes(), kUntouched);
  result.queries.assign(scene.query_elements(), 0xffff);
  const auto table = scene.pages().Table(result.windows.data(), scene.pages().bf16_bytes());
  *status = AppendRowsReference(
      scene.Params(layer, scene.rows().data(), result.queries.data(), table.data(),
                   scene.sequences().data(), scene.slots().data()),
      scene.pages().heads());
  return result;
}

// The same sum in another order, rounded: one step of the result's type, or where terms cancel,
// what 16 bits of the matrix leave of them.
void ExpectNear(const uint16_t* got, const uint16_t* expected, size_t count, ElementType type) {
  size_t apart = 0;
  for (size_t i = 0; i < count; ++i) {
    const bool is_half = type == ElementType::kFp16;
    const float a = is_half ? Float16{got[i]}.ToFloat() : BFloat16{got[i]}.ToFloat();
    const float b = is_half ? Float16{expected[i]}.ToFloat() : BFloat16{expected[i]}.ToFloat();
    apart += got[i] != expected[i] ? 1u : 0u;
    ASSERT_LE(std::fabs(a - b), std::fabs(b) / (is_half ? 1024 : 128) + 3e-4f) << "element " << i;
  }
  // fp16 is so fine that the matrix's last bit decides now and then.
  EXPECT_LT(static_cast<double>(apart),
            (type == ElementType::kFp16 ? 0.2 : 0.03) * static_cast<double>(count) + 4);
}

class AppendRowsGpuTest : public GpuFixture<testing::TestWithParam<AppendShape>> {};

TEST_P(AppendRowsGpuTest, RowsLandInTheirSlotsAndNothingElseIsTouched) {
  AppendScene scene(GetParam());
  DeviceAppend device(scene);
  for (uint32_t layer = 0; layer < AppendScene::kLayers; ++layer) {
    absl::Status status;
    const Result expected = Reference(scene, layer, &status);
    ASSERT_TRUE(status.ok()) << status;
    const Result got = device.Run(layer);
    ExpectNear(got.queries.data(), expected.queries.data(), got.queries.size(), GetParam().type);
    ASSERT_EQ(got.windows.size(), expected.windows.size());
    size_t first = 0;
    for (size_t i = 0; i <= got.windows.size(); i += 2) {  // Runs that the twin has written.
      if (i < got.windows.size() &&
          (expected.windows[i] != kUntouched || expected.windows[i + 1] != kUntouched)) {
        continue;
      }
      if (i > first) {
        ExpectNear(reinterpret_cast<const uint16_t*>(got.windows.data() + first),
                   reinterpret_cast<const uint16_t*>(expected.windows.data() + first),
                   (i - first) / 2, ElementType::kBf16);
      }
      if (i < got.windows.size()) {
        ASSERT_TRUE(got.windows[i] == kUntouched && got.windows[i + 1] == kUntouched) << i;
      }
      first = i + 2;
    }
    const Result again = device.Run(layer);
    EXPECT_TRUE(again.windows == got.windows && again.queries == got.queries);
  }
  EXPECT_TRUE(TakeAppendRowsProblem(device.Params(0), nullptr).ok());
}

TEST_P(AppendRowsGpuTest, QueriesAloneAreRotatedAsWithKeys) {
  if (GetParam().group == 0) {
    return;
  }
  AppendScene scene(GetParam());
  DeviceAppend device(scene);
  const Result with_keys = device.Run(1);
  device.Clear();
  AppendRowsParams params = device.Params(1);
  params.keys = {};
  params.values = {};
  params.pages = nullptr;
  params.slots = nullptr;
  params.tokens_left_out = nullptr;
  const absl::Status status = AppendRows(params, nullptr);
  ASSERT_TRUE(status.ok()) << status;
  CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
  const Result got = device.Download();
  EXPECT_EQ(got.queries, with_keys.queries);
  EXPECT_TRUE(std::all_of(got.windows.begin(), got.windows.end(),
                          [](std::byte b) { return b == kUntouched; }));
}

std::vector<AppendShape> Shapes() {
  std::vector<AppendShape> shapes;
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (const ElementType type : {ElementType::kBf16, ElementType::kFp16}) {
      for (const uint32_t group : {0u, 1u, 4u, 6u, 12u}) {
        shapes.push_back({dim, 3, group, 1, type});
        shapes.push_back({dim, 2, group, 33, type});
        shapes.push_back({dim, 2, group, 3, type, CodecId::kOscarInt2Tilted});
      }
    }
  }
  for (const uint32_t group : {2u, 3u, 5u, 7u, 8u, 16u}) {
    shapes.push_back({64u << group % 3, 2, group, 17, ElementType::kBf16});
  }
  // More tiles than a block takes at a time.
  shapes.push_back({128, 1, 12, 260, ElementType::kBf16});
  shapes.push_back({128, 1, 12, 260, ElementType::kFp16});
  shapes.push_back({256, 1, 12, 130, ElementType::kBf16});
  return shapes;
}

INSTANTIATE_TEST_SUITE_P(Shapes, AppendRowsGpuTest, testing::ValuesIn(Shapes()));

class AppendRowsLimitsGpuTest : public GpuFixture<testing::Test> {};

TEST_F(AppendRowsLimitsGpuTest, TokensWithoutAPlaceAreLeftOutAndCounted) {
  AppendScene scene({128, 2, 4, 10, ElementType::kBf16});
  scene.slots()[0] = AppendScene::kStride * kPageTokens;
  scene.sequences()[2] = 77;
  absl::Status status;
  const Result expected = Reference(scene, 1, &status);
  EXPECT_THAT(std::string(status.message()), HasSubstr("left out 2 tokens"));
  DeviceAppend device(scene);
  const Result got = device.Run(1);
  size_t written = 0;
  for (size_t i = 0; i < got.windows.size(); ++i) {
    written += got.windows[i] != kUntouched ? 1u : 0u;
    ASSERT_EQ(got.windows[i] == kUntouched && expected.windows[i] != kUntouched, false) << i;
  }
  EXPECT_GT(written, 0u);
  status = TakeAppendRowsProblem(device.Params(1), nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("left out 2 tokens"));
  EXPECT_TRUE(TakeAppendRowsProblem(device.Params(1), nullptr).ok()) << "it was taken out";
}

// The launch may begin before the work ahead of it has ended: kernels of its own kind, work that is
// no kernel, and work of several streams at once.
TEST_F(AppendRowsLimitsGpuTest, CapturedBehindOtherWorkGivesTheSame) {
  AppendScene scene({128, 2, 4, 33, ElementType::kBf16});
  DeviceAppend device(scene);
  const Result expected = device.Run(1);
  DeviceBuffer<std::byte> other(1 << 20);
  const TestStream stream;
  const TestStream side;
  cudaEvent_t fork = nullptr;
  cudaEvent_t join = nullptr;
  CRUMB_EXPECT_CUDA(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
  CRUMB_EXPECT_CUDA(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  const auto append = [&](uint32_t layer) {
    const absl::Status status = AppendRows(device.Params(layer), stream.get());
    EXPECT_TRUE(status.ok()) << status;
  };
  CRUMB_EXPECT_CUDA(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal));
  append(0);
  CRUMB_EXPECT_CUDA(cudaEventRecord(fork, stream.get()));
  CRUMB_EXPECT_CUDA(cudaStreamWaitEvent(side.get(), fork));
  CRUMB_EXPECT_CUDA(cudaMemsetAsync(other.data(), 1, 1 << 20, side.get()));
  CRUMB_EXPECT_CUDA(cudaEventRecord(join, side.get()));
  append(0);
  CRUMB_EXPECT_CUDA(cudaStreamWaitEvent(stream.get(), join));
  append(0);
  CRUMB_EXPECT_CUDA(cudaMemsetAsync(other.data(), 2, 1 << 20, stream.get()));
  append(1);
  append(1);
  CRUMB_EXPECT_CUDA(cudaStreamEndCapture(stream.get(), &graph));
  CRUMB_EXPECT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  device.Clear();
  CRUMB_EXPECT_CUDA(cudaGraphLaunch(executable, stream.get()));
  stream.Wait();
  EXPECT_TRUE(device.Download().queries == expected.queries);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaEventDestroy(fork);
  cudaEventDestroy(join);
}

}  // namespace
}  // namespace crumb
