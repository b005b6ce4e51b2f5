// SPDX-License-Identifier: Apache-2.0
//
// Split decode on the GPU against plain sums in double.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "proto/base/bfloat16.h"
#include "proto/base/float16.h"
#include "tests/cuda/gpu/device_scene.h"

namespace crumb {
namespace {

// Of the largest |output|. Queries and probabilities have 16 bits against codes, and windows see
// them as two bf16: most shapes are within 1e-4. A wrong head, token or digit is off by 1e-2 and
// more.
constexpr double kTolerance = 2e-4;

void ExpectNear(const DecodeScene::Result& got,
                const DecodeScene::Result& expected,
                double tolerance = kTolerance) {
  EXPECT_LT(WorstError(got.out, expected.out), tolerance);
  EXPECT_LT(WorstError(got.lse, expected.lse), tolerance);
}

bool SameBits(const DecodeScene::Result& a, const DecodeScene::Result& b) {
  return std::memcmp(a.out.data(), b.out.data(), a.out.size() * sizeof(float)) == 0 &&
         std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)) == 0;
}

class SplitDecodeShapeTest : public GpuFixture<testing::TestWithParam<SceneShape>> {};

TEST_P(SplitDecodeShapeTest, IsThePlainSums) {
  const DecodeScene scene(GetParam());
  DeviceScene device(scene);
  // What 16 bits leave of a score is as large as scores are.
  const double tolerance = kTolerance * std::max(1.0f, GetParam().query_deviation / 6);
  ExpectNear(device.Run(), scene.Expected(), tolerance);
  const absl::Status status = TakeSplitDecodeProblem(device.params(), nullptr);
  EXPECT_TRUE(status.ok()) << status;
}

std::vector<SceneShape> Shapes() {
  std::vector<SceneShape> shapes;
  uint32_t seed = 1;
  for (const uint32_t head_dim : {64u, 128u, 256u}) {
    for (const uint32_t group : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 12u, 16u}) {
      shapes.push_back({.head_dim = head_dim,
                        .num_kv_heads = 1 + group % 3,
                        .group = group,
                        .lengths = {{5, 70}, {0, 3}, {1, 0}, {0, 0}, {2, 128}},
                        .query_type = group % 2 == 0 ? ElementType::kBf16 : ElementType::kFp16,
                        .seed = ++seed});
      shapes.push_back({.head_dim = head_dim,
                        .num_kv_heads = 1,
                        .group = group,
                        .lengths = {{37, 319}},
                        .query_type = group % 2 == 0 ? ElementType::kFp16 : ElementType::kBf16,
                        .seed = ++seed});
    }
  }
  for (const SceneLength length : {SceneLength{0, 0}, {0, 1}, {1, 0}, {0, 64}, {2, 0}, {3, 65}}) {
    shapes.push_back({.head_dim = 128, .num_kv_heads = 8, .group = 4, .lengths = {length}});
  }
  // Long enough for several units a warp on every multiprocessor, and several pairs a block.
  shapes.push_back({.head_dim = 64, .num_kv_heads = 8, .group = 4, .lengths = {{700, 300}}});
  shapes.push_back({.head_dim = 128,
                    .num_kv_heads = 4,
                    .group = 4,
                    .lengths = {{150, 320}, {0, 7}, {90, 0}, {3, 256}, {211, 64}}});
  // Scores far apart: one token takes nearly all.
  shapes.push_back({.head_dim = 128, .group = 4, .lengths = {{9, 65}}, .query_deviation = 40});
  return shapes;
}

INSTANTIATE_TEST_SUITE_P(Shapes, SplitDecodeShapeTest, testing::ValuesIn(Shapes()));

class SplitDecodeGpuTest : public GpuFixture<testing::Test> {};

// A sequence each for every number of tokens in the windows, from none through sink alone to all
// phases of sink 64 and recent 256..319; lengths of history differ too.
TEST_F(SplitDecodeGpuTest, RecentWindowAtEveryPhase) {
  SceneShape shape{.head_dim = 64, .num_kv_heads = 1, .group = 4};
  for (uint32_t tokens = 0; tokens <= 64 + 320; ++tokens) {
    shape.lengths.push_back({tokens % 4, tokens});
  }
  const DecodeScene scene(shape);
  ExpectNear(DeviceScene(scene).Run(), scene.Expected());
}

TEST_F(SplitDecodeGpuTest, EachHeadFindsWhatWasPlantedForIt) {
  for (const uint32_t head_dim : {64u, 128u, 256u}) {
    for (const uint32_t group : {1u, 4u, 6u, 8u, 12u, 16u}) {
      const DecodeScene scene({.head_dim = head_dim,
                               .num_kv_heads = 2,
                               .group = group,
                               .lengths = {{3, 64}, {0, 128}},
                               .query_type = ElementType::kFp16,
                               .planted = true});
      const auto got = DeviceScene(scene).Run();
      for (size_t row = 0; row < scene.num_rows(); ++row) {
        const auto value = static_cast<float>(row % group + 1 + 64 * (row / group));
        for (size_t channel = 0; channel < head_dim; ++channel) {
          ASSERT_NEAR(got.out[row * head_dim + channel], value, 0.02f)
              << "dim " << head_dim << " group " << group << " row " << row;
        }
      }
    }
  }
}

// Scales and minima from the least that fp16 holds to the largest, with queries that make scores of
// ordinary size.
TEST_F(SplitDecodeGpuTest, AnythingAPageCanHoldGivesTheSums) {
  for (const uint32_t head_dim : {64u, 128u, 256u}) {
    for (const float key_size : {1.0f, 65504.0f, 0x1p-14f}) {
      for (const float value_size : {1.0f, 65504.0f, 0x1p-20f}) {
        const SceneShape shape{.head_dim = head_dim,
                               .group = 5,
                               .lengths = {{40, 0}, {3, 0}},
                               .query_deviation = 2 / key_size,
                               .key_size = key_size,
                               .value_size = value_size};
        SCOPED_TRACE(testing::PrintToString(shape));
        const DecodeScene scene(shape);
        ExpectNear(DeviceScene(scene).Run(), scene.Expected());
      }
    }
  }
}

TEST_F(SplitDecodeGpuTest, HugeRowThatNobodyLooksForTakesNoPrecision) {
  for (const uint32_t head_dim : {64u, 128u, 256u}) {
    const DecodeScene scene({.head_dim = head_dim,
                             .group = 5,
                             .lengths = {{40, 20}, {3, 0}},
                             .query_deviation = 0.5f,
                             .has_huge_row = true});
    ExpectNear(DeviceScene(scene).Run(), scene.Expected());
  }
}

// A token with nearly all of the probability beside thousands with a sixteenth of a millionth each:
// together they have a share that rounding each of them against the highest would lose.
TEST_F(SplitDecodeGpuTest, ManySmallProbabilitiesKeepTheirSum) {
  SceneShape shape{.head_dim = 64, .num_kv_heads = 1, .group = 1, .lengths = {{2000, 1}}};
  shape.planted = true;
  DecodeScene scene(shape);
  // Query head 0 looks for channel 1 with 16 nats a unit; keys of 3 there are 48 above the others.
  // Token 1 of each page has it. Weakened to 0.23 of that, they stand 11 nats above the rest, whose
  // 126,000 tokens then weigh about as much as 2.
  std::vector<uint16_t> queries = scene.queries();
  for (uint16_t& bits : queries) {
    bits = BFloat16::FromFloat(BFloat16{bits}.ToFloat() * 0.23f).bits;
  }
  DeviceScene device(scene);
  const DeviceBuffer<uint16_t> weak(queries);
  device.params().queries = weak.data();
  const auto got = device.Run();
  const double factor = double{BFloat16{queries[1]}.ToFloat()} * 3 / 8;
  const double heavy = 2000 * std::exp(factor);
  const double others = 2000.0 * 63 + 1;
  const double mean = (heavy * 1 + 2000 * (63.0 * 64 / 2 - 1)) / (heavy + others);
  EXPECT_NEAR(got.out[5], mean, 2e-4 * mean)
      << "of which small ones bring " << mean - heavy / (heavy + others);
}

TEST_F(SplitDecodeGpuTest, AnyCutGivesTheSums) {
  const DecodeScene scene({.head_dim = 128,
                           .num_kv_heads = 3,
                           .group = 5,
                           .lengths = {{17, 100}, {0, 9}, {40, 0}, {2, 64}}});
  const auto expected = scene.Expected();
  DeviceScene device(scene);
  for (const uint32_t num_blocks : {1u, 2u, 3u, 7u, 64u, 132u, 1000u}) {
    for (const auto& [warps, stages] : std::vector<std::pair<int, int>>{{1, 1}, {3, 2}, {8, 4}}) {
      ExpectNear(device.RunOnGrid({num_blocks, warps, stages, 1, 5}), expected);
    }
  }
  ExpectNear(device.RunOnGrid({64, 4, 3, 3, 2}), expected);  // In passes of two query heads.
  EXPECT_TRUE(TakeSplitDecodeProblem(device.params(), nullptr).ok());
}

// More blocks than units, pairs of a single unit, and passes among them.
TEST_F(SplitDecodeGpuTest, AnyTeamGivesTheSums) {
  for (const SceneLength length : {SceneLength{0, 0}, {1, 0}, {0, 3}, {37, 100}, {0, 400}}) {
    const DecodeScene scene({.head_dim = 128, .num_kv_heads = 3, .group = 5, .lengths = {length}});
    const auto expected = scene.Expected();
    DeviceScene device(scene);
    for (const uint32_t team : {2u, 5u, 16u, 44u, 100u}) {
      ExpectNear(device.RunOnGrid({3 * team, 3, 2, 1, 5, team}), expected);
      ExpectNear(device.RunOnGrid({9 * team, 8, 1, 3, 2, team}), expected);
    }
    EXPECT_TRUE(TakeSplitDecodeProblem(device.params(), nullptr).ok());
  }
}

TEST_F(SplitDecodeGpuTest, RunsGiveTheSameBits) {
  const DecodeScene scene(
      {.head_dim = 128, .num_kv_heads = 8, .group = 4, .lengths = {{301, 311}, {12, 64}, {77, 0}}});
  DeviceScene device(scene);
  const auto first = device.Run();
  for (int run = 0; run < 50; ++run) {
    ASSERT_TRUE(SameBits(device.Run(), first)) << "run " << run;
  }
}

TEST_F(SplitDecodeGpuTest, OutputsInHalfPrecisionAreTheRoundedSums) {
  for (const ElementType type : {ElementType::kBf16, ElementType::kFp16}) {
    const DecodeScene scene({.head_dim = 64, .group = 4, .lengths = {{3, 17}, {0, 0}}});
    DeviceScene device(scene);
    const auto exact = device.Run();
    DeviceBuffer<uint16_t> out(scene.num_rows() * 64);
    device.params().out = out.data();
    device.params().out_type = type;
    ASSERT_TRUE(SplitDecode(device.params(), nullptr).ok());
    const auto bits = out.Download();
    for (size_t i = 0; i < bits.size(); ++i) {
      EXPECT_EQ(bits[i], type == ElementType::kBf16 ? BFloat16::FromFloat(exact.out[i]).bits
                                                    : Float16::FromFloat(exact.out[i]).bits);
    }
  }
}

// Lengths are read when the graph runs, not when it is captured.
TEST_F(SplitDecodeGpuTest, CapturedGraphServesOtherLengths) {
  SceneShape shape{.head_dim = 128, .group = 4, .lengths = {{20, 300}, {9, 64}, {0, 1}}};
  const DecodeScene scene(shape);
  DeviceScene device(scene);
  const TestStream stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  CRUMB_EXPECT_CUDA(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal));
  ASSERT_TRUE(SplitDecode(device.params(), stream.get()).ok());
  CRUMB_EXPECT_CUDA(cudaStreamEndCapture(stream.get(), &graph));
  CRUMB_EXPECT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  const auto full = device.Run();
  device.SpoilOutputs();
  CRUMB_EXPECT_CUDA(cudaGraphLaunch(executable, stream.get()));
  stream.Wait();
  EXPECT_TRUE(SameBits(device.Download(), full));

  device.history_pages().Upload({0, 5, 0});
  device.window_tokens().Upload({1, 63, 0});
  const auto shorter = device.Run();
  device.SpoilOutputs();
  CRUMB_EXPECT_CUDA(cudaGraphLaunch(executable, stream.get()));
  stream.Wait();
  EXPECT_TRUE(SameBits(device.Download(), shorter));
  EXPECT_FALSE(SameBits(shorter, full));
  EXPECT_EQ(shorter.lse.back(), -std::numeric_limits<float>::infinity());
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

// Launches that overlap one another, on one workspace.
TEST_F(SplitDecodeGpuTest, SettledHistoryChangesNothing) {
  const DecodeScene scene(
      {.head_dim = 128, .num_kv_heads = 8, .group = 4, .lengths = {{90, 200}, {7, 9}}});
  DeviceScene device(scene);
  const auto expected = device.Run();
  device.params().history_is_settled = true;
  DeviceBuffer<float> others(scene.num_rows() * 128);
  const TestStream stream;
  for (int run = 0; run < 20; ++run) {
    device.SpoilOutputs();
    CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
    SplitDecodeParams other = device.params();
    other.out = others.data();
    for (int i = 0; i < 5; ++i) {
      ASSERT_TRUE(SplitDecode(other, stream.get()).ok());
    }
    ASSERT_TRUE(SplitDecode(device.params(), stream.get()).ok());
    stream.Wait();
    ASSERT_TRUE(SameBits(device.Download(), expected)) << "run " << run;
  }
}

}  // namespace
}  // namespace crumb
