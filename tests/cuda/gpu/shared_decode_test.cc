// SPDX-License-Identifier: Apache-2.0
//
// Shared decode on the GPU against plain sums in double.
#include "crumb/cuda/shared_decode.h"

#include <cstring>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "crumb/cuda/split_decode.h"
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
    return Finish([this] { return SharedDecode(params_, nullptr); });
  }
  // What the sequences have for themselves.
  DecodeScene::Result RunOwn() {
    return Finish([this] { return SplitDecode(params_.batch, nullptr); });
  }

 private:
  template <typename Op>
  DecodeScene::Result Finish(Op&& op) {
    device_.SpoilOutputs();
    const absl::Status status = op();
    EXPECT_TRUE(status.ok()) << status;
    CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
    return device_.Download();
  }

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
    for (const uint32_t group : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 12u, 16u}) {
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
  const auto add_many = [&](uint32_t head_dim, uint32_t pages) {
    SceneShape shape{.head_dim = head_dim, .num_kv_heads = 2, .group = 4, .shared_pages = pages};
    for (uint32_t i = 0; i < 37; ++i) {
      shape.lengths.push_back({pages + i % 3, i * 7 % 90});
    }
    shapes.push_back(shape);
  };
  add_many(64, 9);
  add_many(128, 3);
  add_many(128, 60);
  add_many(256, 9);
  return shapes;
}

INSTANTIATE_TEST_SUITE_P(Shapes, SharedDecodeShapeTest, testing::ValuesIn(Shapes()));

class SharedDecodeGpuTest : public HopperFixture<testing::Test> {};

void ExpectTheSums(const DecodeScene& scene) {
  const auto got = SharedScene(scene).Run();
  const auto expected = scene.Expected();
  EXPECT_LT(WorstError(got.out, expected.out), kTolerance);
  EXPECT_LT(WorstError(got.lse, expected.lse), kTolerance);
}

// Scores far apart: maxima must be raised again and again.
TEST_F(SharedDecodeGpuTest, MaximaRiseFromPageToPage) {
  const DecodeScene scene({.head_dim = 128,
                           .num_kv_heads = 2,
                           .group = 4,
                           .lengths = {{200, 65}, {200, 3}},
                           .query_deviation = 30,
                           .shared_pages = 200});
  ExpectTheSums(scene);
}

// Scales and minima from the least that fp16 holds to the largest, with queries that make scores of
// ordinary size; of 4120, about every third page has a scale that is too large to be multiplied by
// 16.
TEST_F(SharedDecodeGpuTest, AnythingAPageCanHoldGivesTheSums) {
  for (const uint32_t head_dim : {64u, 128u, 256u}) {
    for (const float key_size : {1.0f, 4120.0f, 65504.0f, 0x1p-14f}) {
      for (const float value_size : {1.0f, 4120.0f, 65504.0f, 0x1p-20f}) {
        const SceneShape shape{.head_dim = head_dim,
                               .group = 4,
                               .lengths = {{40, 0}, {41, 0}},
                               .query_deviation = 2 / key_size,
                               .shared_pages = 40,
                               .key_size = key_size,
                               .value_size = value_size};
        SCOPED_TRACE(testing::PrintToString(shape));
        const DecodeScene scene(shape);
        ExpectTheSums(scene);
      }
    }
  }
}

TEST_F(SharedDecodeGpuTest, HugeRowThatNobodyLooksForTakesNoPrecision) {
  for (const uint32_t head_dim : {64u, 128u, 256u}) {
    const DecodeScene scene({.head_dim = head_dim,
                             .group = 4,
                             .lengths = {{40, 20}, {41, 0}},
                             .query_deviation = 0.5f,
                             .shared_pages = 40,
                             .has_huge_row = true});
    ExpectTheSums(scene);
  }
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
    shared.params().batch.history_is_settled = run % 2 == 1;
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

// Launches that are on their way together must not see one another's work.
TEST_F(SharedDecodeGpuTest, LaunchesInARowGiveTheSameBits) {
  SceneShape shape{.head_dim = 128, .num_kv_heads = 8, .group = 4, .shared_pages = 20};
  shape.lengths.assign(32, SceneLength{22, 30});
  const DecodeScene scene(shape);
  SharedScene shared(scene);
  const auto first = shared.Run();
  shared.params().batch.history_is_settled = true;
  for (int run = 0; run < 50; ++run) {
    ASSERT_TRUE(SharedDecode(shared.params(), nullptr).ok());
  }
  const auto last = shared.Run();
  EXPECT_EQ(std::memcmp(last.out.data(), first.out.data(), first.out.size() * 4), 0);
}

TEST_F(SharedDecodeGpuTest, PrefixOfNoPagesLeavesTheOwnPart) {
  for (const uint32_t head_dim : {64u, 128u, 256u}) {
    const DecodeScene scene(
        {.head_dim = head_dim, .group = 4, .lengths = {{9, 3}, {8, 20}}, .shared_pages = 8});
    SharedScene shared(scene);
    const DeviceBuffer<uint32_t> none(std::vector<uint32_t>{0});
    shared.params().prefix_pages = none.data();
    const auto got = shared.Run();
    const auto expected = shared.RunOwn();
    EXPECT_LT(WorstError(got.out, expected.out), 1e-5) << head_dim;
    EXPECT_LT(WorstError(got.lse, expected.lse), 1e-5) << head_dim;
  }
}

TEST_F(SharedDecodeGpuTest, LengthOfThePrefixBeyondItsTableIsCutAndNamed) {
  const DecodeScene scene({.head_dim = 128, .group = 4, .lengths = {{5, 65}}, .shared_pages = 5});
  SharedScene shared(scene);
  const auto expected = shared.Run();
  EXPECT_TRUE(TakeSplitDecodeProblem(shared.params().batch, nullptr).ok());
  const DeviceBuffer<uint32_t> six(std::vector<uint32_t>{6});
  shared.params().prefix_pages = six.data();
  const auto got = shared.Run();
  EXPECT_EQ(got.out, expected.out);
  const absl::Status status = TakeSplitDecodeProblem(shared.params().batch, nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("prefix_pages beyond"));
  EXPECT_TRUE(TakeSplitDecodeProblem(shared.params().batch, nullptr).ok()) << "it was taken out";
}

TEST_F(SharedDecodeGpuTest, NullPageOfThePrefixIsLeftOutAndNamed) {
  constexpr uint32_t kPages = 5;
  const DecodeScene scene(
      {.head_dim = 128, .group = 4, .lengths = {{kPages, 65}}, .shared_pages = kPages});
  for (const uint32_t missing : {0u, 2u, 4u}) {
    SharedScene shared(scene);
    std::vector<const std::byte*> pages(kPages);
    CRUMB_EXPECT_CUDA(cudaMemcpy(pages.data(), shared.params().prefix.pages,
                                 kPages * sizeof(pages[0]), cudaMemcpyDeviceToHost));
    const DeviceBuffer<const std::byte*> whole(pages);
    pages[missing] = nullptr;
    const DeviceBuffer<const std::byte*> with_null(pages);
    shared.params().prefix.pages = with_null.data();
    const auto got = shared.Run();
    const absl::Status status = TakeSplitDecodeProblem(shared.params().batch, nullptr);
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("null page"));
    pages.erase(pages.begin() + missing);
    const DeviceBuffer<const std::byte*> without(pages);
    const DeviceBuffer<uint32_t> four(std::vector<uint32_t>{kPages - 1});
    shared.params().prefix.pages = without.data();
    shared.params().prefix_pages = four.data();
    const auto expected = shared.Run();
    EXPECT_LT(WorstError(got.out, expected.out), 1e-3) << missing;
    const DeviceBuffer<uint32_t> five(std::vector<uint32_t>{kPages});
    shared.params().prefix.pages = whole.data();
    shared.params().prefix_pages = five.data();
    EXPECT_GT(WorstError(got.out, shared.Run().out), 1e-3) << missing;
  }
}

}  // namespace
}  // namespace crumb
