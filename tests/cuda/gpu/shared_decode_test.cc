// SPDX-License-Identifier: Apache-2.0
//
// Shared decode on the GPU against plain sums in double.
#include "crumb/cuda/shared_decode.h"

#include <cstring>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/cuda/gpu/device_scene.h"

namespace crumb {
namespace {

// Of the largest |output|: probabilities have 11 bits and V is dequantised to 11. A wrong head,
// token or row is off by 1e-2 and more.
constexpr double kTolerance = 1e-3;

// The scene's pages that all sequences share, as a prefix of the rest.
class SharedScene {
 public:
  explicit SharedScene(const DecodeScene& scene)
      : device_(scene), prefix_pages_(std::vector<uint32_t>{scene.shape().shared_pages}) {
    const uint32_t shared = scene.shape().shared_pages;
    params_.batch = device_.params();
    params_.prefix = device_.params().history;
    params_.prefix.stride = shared;
    params_.prefix_pages = prefix_pages_.data();
    std::vector<uint32_t> own = scene.HistoryPages();
    for (uint32_t& pages : own) {
      pages -= shared;
    }
    own_pages_ = DeviceBuffer<uint32_t>(own);
    params_.batch.history = OwnTable(params_.batch, shared);
    params_.batch.history_pages = own_pages_.data();
    const auto bytes = SharedDecodeWorkspaceBytes(params_);
    EXPECT_TRUE(bytes.ok()) << bytes.status();
    workspace_ = DeviceBuffer<std::byte>(*bytes);
    workspace_.Fill(0);
    params_.batch.workspace = workspace_.data();
    params_.batch.workspace_bytes = workspace_.size();
  }

  SharedDecodeParams& params() { return params_; }
  DecodeScene::Result Run() {
    device_.SpoilOutputs();
    const absl::Status status = SharedDecode(params_, nullptr);
    EXPECT_TRUE(status.ok()) << status;
    CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
    return device_.Download();
  }

 private:
  // The batch's table without the first `shared` pages of each sequence.
  DevicePageTable OwnTable(const SplitDecodeParams& batch, uint32_t shared) {
    const uint32_t own = batch.history.stride - shared;
    std::vector<const std::byte*> pages(size_t{batch.num_sequences} * own);
    if (own > 0) {
      CRUMB_EXPECT_CUDA(
          cudaMemcpy2D(pages.data(), own * sizeof(pages[0]), batch.history.pages + shared,
                       batch.history.stride * sizeof(pages[0]), own * sizeof(pages[0]),
                       batch.num_sequences, cudaMemcpyDeviceToHost));
    }
    own_table_ = DeviceBuffer<const std::byte*>(pages);
    DevicePageTable table = batch.history;
    table.pages = own_table_.data();
    table.stride = own;
    return table;
  }

  DeviceScene device_;
  DeviceBuffer<uint32_t> prefix_pages_;
  DeviceBuffer<const std::byte*> own_table_;
  DeviceBuffer<uint32_t> own_pages_;
  DeviceBuffer<std::byte> workspace_;
  SharedDecodeParams params_;
};

// Hopper's matrix products are in the kernel's heart.
template <typename Base>
class HopperFixture : public GpuFixture<Base> {
 protected:
  void SetUp() override {
    GpuFixture<Base>::SetUp();
    if (const auto device = CurrentGpu(); device.ok() && device->major != 9) {
      GTEST_SKIP() << device->name << " is not of compute capability 9.0";
    }
  }
};

class SharedDecodeShapeTest : public HopperFixture<testing::TestWithParam<SceneShape>> {};

TEST_P(SharedDecodeShapeTest, IsThePlainSums) {
  const DecodeScene scene(GetParam());
  SharedScene shared(scene);
  const auto got = shared.Run();
  const auto expected = scene.Expected();
  EXPECT_LT(WorstError(got.out, expected.out), kTolerance);
  EXPECT_LT(WorstError(got.lse, expected.lse), kTolerance);
  const absl::Status status = TakeSplitDecodeProblem(shared.params().batch, nullptr);
  EXPECT_TRUE(status.ok()) << status;
}

std::vector<SceneShape> Shapes() {
  std::vector<SceneShape> shapes;
  uint32_t seed = 1;
  for (const uint32_t head_dim : {64u, 128u, 256u}) {
    for (const uint32_t group : {1u, 3u, 4u, 8u, 12u, 16u}) {
      for (const uint32_t pages : {1u, 2u, 7u, 40u}) {
        SceneShape shape{.head_dim = head_dim,
                         .num_kv_heads = 1 + group % 2,
                         .group = group,
                         .lengths = {{pages, 70}, {pages + 2, 0}, {pages, 0}, {pages + 1, 128}},
                         .query_type = group % 2 == 0 ? ElementType::kBf16 : ElementType::kFp16,
                         .shared_pages = pages,
                         .seed = ++seed};
        shapes.push_back(shape);
      }
    }
  }
  // More rows than a block takes; a page for hardly any split, and many.
  for (const uint32_t pages : {3u, 60u}) {
    SceneShape shape{.head_dim = 128, .num_kv_heads = 2, .group = 4, .shared_pages = pages};
    for (uint32_t i = 0; i < 37; ++i) {
      shape.lengths.push_back({pages + i % 3, i * 7 % 90});
    }
    shapes.push_back(shape);
  }
  return shapes;
}

INSTANTIATE_TEST_SUITE_P(Shapes, SharedDecodeShapeTest, testing::ValuesIn(Shapes()));

class SharedDecodeGpuTest : public HopperFixture<testing::Test> {};

// Scores far apart: maxima must be raised again and again.
TEST_F(SharedDecodeGpuTest, MaximaRiseFromPageToPage) {
  const DecodeScene scene({.head_dim = 128,
                           .num_kv_heads = 2,
                           .group = 4,
                           .lengths = {{200, 65}, {200, 3}},
                           .query_deviation = 30,
                           .shared_pages = 200});
  const auto got = SharedScene(scene).Run();
  const auto expected = scene.Expected();
  EXPECT_LT(WorstError(got.out, expected.out), kTolerance);
  EXPECT_LT(WorstError(got.lse, expected.lse), kTolerance);
}

TEST_F(SharedDecodeGpuTest, EachHeadFindsWhatWasPlantedForIt) {
  for (const uint32_t head_dim : {64u, 128u, 256u}) {
    for (const uint32_t group : {4u, 6u, 12u}) {
      const DecodeScene scene({.head_dim = head_dim,
                               .num_kv_heads = 2,
                               .group = group,
                               .lengths = {{3, 0}},
                               .query_type = ElementType::kFp16,
                               .shared_pages = 3,
                               .planted = true});
      const auto got = SharedScene(scene).Run();
      for (size_t row = 0; row < scene.num_rows(); ++row) {
        const auto value = static_cast<float>(row % group + 1 + 64 * (row / group));
        for (size_t channel = 0; channel < head_dim; ++channel) {
          ASSERT_NEAR(got.out[row * head_dim + channel], value, 0.1f)
              << "dim " << head_dim << " group " << group << " row " << row;
        }
      }
    }
  }
}

TEST_F(SharedDecodeGpuTest, RunsGiveTheSameBits) {
  SceneShape shape{.head_dim = 128, .num_kv_heads = 4, .group = 4, .shared_pages = 90};
  shape.lengths.assign(16, SceneLength{92, 100});
  const DecodeScene scene(shape);
  SharedScene shared(scene);
  const auto first = shared.Run();
  for (int run = 0; run < 20; ++run) {
    const auto again = shared.Run();
    ASSERT_EQ(std::memcmp(again.out.data(), first.out.data(), first.out.size() * 4), 0) << run;
    ASSERT_EQ(std::memcmp(again.lse.data(), first.lse.data(), first.lse.size() * 4), 0) << run;
  }
}

TEST_F(SharedDecodeGpuTest, CapturedGraphGivesTheSame) {
  const DecodeScene scene(
      {.head_dim = 64, .group = 4, .lengths = {{9, 3}, {8, 0}}, .shared_pages = 8});
  SharedScene shared(scene);
  const auto direct = shared.Run();
  const TestStream stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  CRUMB_EXPECT_CUDA(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal));
  ASSERT_TRUE(SharedDecode(shared.params(), stream.get()).ok());
  CRUMB_EXPECT_CUDA(cudaStreamEndCapture(stream.get(), &graph));
  CRUMB_EXPECT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  std::vector<float> out(direct.out.size());
  CRUMB_EXPECT_CUDA(cudaMemset(shared.params().batch.out, 0xff, out.size() * sizeof(float)));
  CRUMB_EXPECT_CUDA(cudaGraphLaunch(executable, stream.get()));
  stream.Wait();
  CRUMB_EXPECT_CUDA(cudaMemcpy(out.data(), shared.params().batch.out, out.size() * sizeof(float),
                               cudaMemcpyDeviceToHost));
  EXPECT_EQ(out, direct.out);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

TEST_F(SharedDecodeGpuTest, NullPageOfThePrefixIsLeftOutAndNamed) {
  const DecodeScene scene({.head_dim = 128, .group = 4, .lengths = {{5, 65}}, .shared_pages = 5});
  SharedScene shared(scene);
  DeviceBuffer<const std::byte*> table(5);
  std::vector<const std::byte*> pages(5);
  CRUMB_EXPECT_CUDA(cudaMemcpy(pages.data(), shared.params().prefix.pages, 5 * sizeof(pages[0]),
                               cudaMemcpyDeviceToHost));
  pages[4] = nullptr;
  table.Upload(pages);
  shared.params().prefix.pages = table.data();
  const auto with_null = shared.Run();
  const absl::Status status = TakeSplitDecodeProblem(shared.params().batch, nullptr);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("null page"));
  const DeviceBuffer<uint32_t> four(std::vector<uint32_t>{4});
  shared.params().prefix_pages = four.data();
  EXPECT_LT(WorstError(with_null.out, shared.Run().out), 1e-3);
}

}  // namespace
}  // namespace crumb
