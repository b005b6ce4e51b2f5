// SPDX-License-Identifier: Apache-2.0
//
// Prefill attention on the GPU against the twin in double.
#include "cuda/launch/prefill_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/cuda/gpu/device_buffer.h"
#include "tests/cuda/gpu/gpu_fixture.h"
#include "tests/cuda/gpu/prefill_scene.h"

namespace crumb {
namespace {

// Of the largest |output|. Probabilities are rounded to bf16, half a step of 2^-8, and errors of
// many tokens average out; of a query that sees two tokens they do not. A wrong head, token or mask
// is off by tenths.
constexpr double kTolerance = 5e-3;

double WorstError(const std::vector<float>& got, const std::vector<float>& expected) {
  double worst = 0;
  double largest = 1e-3;
  for (size_t i = 0; i < got.size(); ++i) {
    if (!std::isfinite(got[i])) {
      return INFINITY;
    }
    worst = std::max(worst, std::fabs(double{got[i]} - double{expected[i]}));
    largest = std::max(largest, std::fabs(double{expected[i]}));
  }
  return worst / largest;
}

struct Result {
  std::vector<float> out;
  std::vector<float> lse;
};

class DevicePrefill {
 public:
  explicit DevicePrefill(const PrefillScene& scene)
      : int2_(scene.int2()),
        windows_(scene.windows()),
        queries_(scene.queries()),
        history_table_(scene.HistoryTable(int2_.data())),
        window_table_(scene.WindowTable(windows_.data())),
        out_(scene.num_rows() * scene.shape().dim),
        lse_(scene.num_rows()),
        params_(scene.Params(queries_.data(),
                             history_table_.data(),
                             window_table_.data(),
                             out_.data(),
                             lse_.data())) {}
  PrefillAttentionParams& params() { return params_; }
  // Pages of either table that are no longer there, on both sides.
  void DropPages(uint32_t history, uint32_t window) {
    CRUMB_EXPECT_CUDA(
        cudaMemset(history_table_.data() + history, 0, sizeof(history_table_.data()[0])));
    CRUMB_EXPECT_CUDA(
        cudaMemset(window_table_.data() + window, 0, sizeof(window_table_.data()[0])));
  }
  DeviceBuffer<float>& out() { return out_; }

  Result Run() {
    Clear();
    const absl::Status status = PrefillAttention(params_, nullptr);
    EXPECT_TRUE(status.ok()) << status;
    return Take();
  }

  // By the form of devices before compute capability 9.0, which every device can run.
  Result RunOlderForm() {
    Clear();
    const auto launch = params_.head_dim == 64    ? gpu::LaunchPrefillAttention64
                        : params_.head_dim == 128 ? gpu::LaunchPrefillAttention128
                                                  : gpu::LaunchPrefillAttention256;
    EXPECT_EQ(launch(params_, nullptr), cudaSuccess);
    return Take();
  }

 private:
  void Clear() {
    out_.Fill(0xff);
    lse_.Fill(0xff);
  }
  Result Take() {
    CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
    return {out_.Download(), lse_.Download()};
  }

  DeviceBuffer<std::byte> int2_;
  DeviceBuffer<BFloat16> windows_;
  DeviceBuffer<uint16_t> queries_;
  DeviceBuffer<const std::byte*> history_table_;
  DeviceBuffer<const std::byte*> window_table_;
  DeviceBuffer<float> out_;
  DeviceBuffer<float> lse_;
  PrefillAttentionParams params_;
};

// As the op has them: queries of fp16 are rounded to bf16.
std::vector<uint16_t> RoundedQueries(const PrefillScene& scene) {
  std::vector<uint16_t> bits = scene.queries();
  if (scene.shape().query_type == ElementType::kFp16) {
    std::transform(bits.begin(), bits.end(), bits.begin(),
                   [](uint16_t half) { return BFloat16::FromFloat(Float16{half}.ToFloat()).bits; });
  }
  return bits;
}

Result Reference(const PrefillScene& scene, float sharpness = 1) {
  const std::vector<uint16_t> queries = RoundedQueries(scene);
  Result result{std::vector<float>(scene.num_rows() * scene.shape().dim),
                std::vector<float>(scene.num_rows())};
  const auto history = scene.HistoryTable(scene.int2().data());
  const auto windows = scene.WindowTable(scene.windows().data());
  PrefillAttentionParams params = scene.Params(queries.data(), history.data(), windows.data(),
                                               result.out.data(), result.lse.data());
  params.query_type = ElementType::kBf16;
  params.scale *= sharpness;
  const absl::Status status = PrefillAttentionReference(params);
  EXPECT_TRUE(status.ok()) << status;
  return result;
}

class PrefillAttentionGpuTest : public GpuFixture<testing::TestWithParam<PrefillShape>> {};

TEST_P(PrefillAttentionGpuTest, IsThePlainSums) {
  const PrefillScene scene(GetParam());
  const Result expected = Reference(scene);
  DevicePrefill device(scene);
  const Result got = device.Run();
  EXPECT_LT(WorstError(got.out, expected.out), kTolerance);
  EXPECT_LT(WorstError(got.lse, expected.lse), 1e-4);
  const Result again = device.Run();
  EXPECT_EQ(std::memcmp(again.out.data(), got.out.data(), got.out.size() * sizeof(float)), 0);
  const Result older = device.RunOlderForm();
  EXPECT_LT(WorstError(older.out, expected.out), kTolerance);
  EXPECT_LT(WorstError(older.lse, expected.lse), 1e-4);
}

std::vector<PrefillShape> Shapes() {
  std::vector<PrefillShape> shapes;
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (const uint32_t group : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 12u, 16u}) {
      shapes.push_back({dim, 1 + group % 3, group, 2, 64 + 40, 40});
    }
    shapes.push_back({dim, 2, 4, 0, 1, 1});       // A token that sees itself.
    shapes.push_back({dim, 2, 4, 0, 70, 70});     // A chunk and nothing before it.
    shapes.push_back({dim, 2, 4, 1, 5, 5});       // History, no sink.
    shapes.push_back({dim, 1, 4, 7, 64, 1});      // The window's last row alone.
    shapes.push_back({dim, 1, 2, 33, 449, 130});  // Several blocks of rows, ragged ends.
    PrefillShape halves{dim, 2, 3, 5, 150, 90};
    halves.query_type = ElementType::kFp16;
    shapes.push_back(halves);
  }
  return shapes;
}

INSTANTIATE_TEST_SUITE_P(Shapes, PrefillAttentionGpuTest, testing::ValuesIn(Shapes()));

class PrefillAttentionLimitsGpuTest : public GpuFixture<testing::Test> {};

TEST_F(PrefillAttentionLimitsGpuTest, OutputsAreRoundedToTheTypeThatIsAskedFor) {
  const PrefillScene scene({.history_pages = 3, .window_tokens = 100, .num_queries = 20});
  DevicePrefill device(scene);
  const std::vector<float> floats = device.Run().out;
  for (const ElementType type : {ElementType::kBf16, ElementType::kFp16}) {
    device.params().out_type = type;
    ASSERT_TRUE(PrefillAttention(device.params(), nullptr).ok());
    CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
    const std::vector<float> words = device.out().Download();
    for (size_t i = 0; i < floats.size(); ++i) {
      uint16_t bits;
      std::memcpy(&bits, reinterpret_cast<const std::byte*>(words.data()) + 2 * i, 2);
      ASSERT_EQ(bits, type == ElementType::kBf16 ? BFloat16::FromFloat(floats[i]).bits
                                                 : Float16::FromFloat(floats[i]).bits);
    }
  }
}

// Rounding queries of fp16 to bf16 costs what it costs an engine that has them in bf16.
TEST_F(PrefillAttentionLimitsGpuTest, QueriesOfHalvesAreNearTheUnroundedSums) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    PrefillShape shape{.dim = dim, .history_pages = 5, .window_tokens = 150, .num_queries = 90};
    shape.query_type = ElementType::kFp16;
    const PrefillScene scene(shape);
    const auto history = scene.HistoryTable(scene.int2().data());
    const auto windows = scene.WindowTable(scene.windows().data());
    Result exact{std::vector<float>(scene.num_rows() * dim), std::vector<float>(scene.num_rows())};
    ASSERT_TRUE(
        PrefillAttentionReference(scene.Params(scene.queries().data(), history.data(),
                                               windows.data(), exact.out.data(), exact.lse.data()))
            .ok());
    const Result got = DevicePrefill(scene).Run();
    EXPECT_LT(WorstError(got.out, exact.out), 2 * kTolerance) << dim;
    EXPECT_LT(WorstError(got.lse, exact.lse), 2e-3) << dim;
  }
}

// Windows of every length up to sink and recent window, of which a chunk is the end; history of
// none to three pages before them.
TEST_F(PrefillAttentionLimitsGpuTest, WindowAtEveryPhase) {
  for (uint32_t tokens = 1; tokens <= 3 * kPageTokens + 1; ++tokens) {
    const PrefillScene scene({.dim = tokens % 2 == 0 ? 64u : 128u,
                              .num_kv_heads = 1,
                              .group = 3,
                              .history_pages = tokens % 4,
                              .window_tokens = tokens,
                              .num_queries = std::min(tokens, 1 + tokens % 7)});
    DevicePrefill device(scene);
    const Result expected = Reference(scene);
    EXPECT_LT(WorstError(device.Run().out, expected.out), kTolerance) << tokens << " tokens";
    EXPECT_LT(WorstError(device.RunOlderForm().out, expected.out), kTolerance)
        << tokens << " tokens";
  }
}

// Scores of a standard deviation of tens: the largest of a row is often in a later page, far above
// all before it, and hardly any weight but its own counts.
TEST_F(PrefillAttentionLimitsGpuTest, MaximaThatRiseLateCount) {
  constexpr float kSharpness = 16;
  for (const uint32_t dim : {64u, 128u, 256u}) {
    const PrefillScene scene(
        {.dim = dim, .history_pages = 9, .window_tokens = 200, .num_queries = 50});
    const Result expected = Reference(scene, kSharpness);
    DevicePrefill device(scene);
    device.params().scale *= kSharpness;
    const Result got = device.Run();
    EXPECT_LT(WorstError(got.out, expected.out), kTolerance) << "head_dim " << dim;
    EXPECT_LT(WorstError(got.lse, expected.lse), 1e-4) << "head_dim " << dim;
  }
}

// Scales and minima from the least that fp16 holds to the largest, with scores of ordinary size.
TEST_F(PrefillAttentionLimitsGpuTest, AnythingAPageCanHoldGivesTheSums) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (const float key_size : {1.0f, 65504.0f, 0x1p-14f}) {
      for (const float value_size : {1.0f, 65504.0f, 0x1p-20f}) {
        SCOPED_TRACE(testing::Message() << dim << " " << key_size << " " << value_size);
        const PrefillScene scene({.dim = dim,
                                  .history_pages = 20,
                                  .window_tokens = 50,
                                  .num_queries = 50,
                                  .key_size = key_size,
                                  .value_size = value_size});
        const Result expected = Reference(scene, 1 / key_size);
        DevicePrefill device(scene);
        device.params().scale *= 1 / key_size;
        const Result got = device.Run();
        EXPECT_LT(WorstError(got.out, expected.out), kTolerance);
        EXPECT_LT(WorstError(got.lse, expected.lse), 1e-4);
        const Result older = device.RunOlderForm();
        EXPECT_LT(WorstError(older.out, expected.out), kTolerance);
        EXPECT_LT(WorstError(older.lse, expected.lse), 1e-4);
      }
    }
  }
}

TEST_F(PrefillAttentionLimitsGpuTest, NullPagesCountAsZerosAndAreCounted) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    SCOPED_TRACE(dim);
    const PrefillScene scene(
        {.dim = dim, .history_pages = 5, .window_tokens = 200, .num_queries = 50});
    Result expected{std::vector<float>(scene.num_rows() * dim),
                    std::vector<float>(scene.num_rows())};
    auto history = scene.HistoryTable(scene.int2().data());
    auto windows = scene.WindowTable(scene.windows().data());
    history[3] = windows[1] = nullptr;
    uint64_t num_null = 0;
    PrefillAttentionParams params =
        scene.Params(scene.queries().data(), history.data(), windows.data(), expected.out.data(),
                     expected.lse.data());
    params.null_pages = &num_null;
    ASSERT_TRUE(PrefillAttentionReference(params).ok());
    EXPECT_EQ(num_null, 2u);

    DevicePrefill device(scene);
    const DeviceBuffer<uint64_t> found(std::vector<uint64_t>{0});
    device.params().null_pages = found.data();
    device.Run();
    EXPECT_TRUE(TakePrefillAttentionProblem(device.params(), nullptr).ok());
    device.DropPages(3, 1);
    const Result got = device.Run();
    EXPECT_LT(WorstError(got.out, expected.out), kTolerance);
    EXPECT_LT(WorstError(got.lse, expected.lse), 1e-4);
    const absl::Status status = TakePrefillAttentionProblem(device.params(), nullptr);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("met 2 null pages"));
    EXPECT_TRUE(TakePrefillAttentionProblem(device.params(), nullptr).ok()) << "it was taken out";
    const Result older = device.RunOlderForm();
    EXPECT_LT(WorstError(older.out, expected.out), kTolerance);
    EXPECT_FALSE(TakePrefillAttentionProblem(device.params(), nullptr).ok());
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }
}

TEST_F(PrefillAttentionLimitsGpuTest, OneQueryAtATimeIsTheChunk) {
  const PrefillShape shape{.history_pages = 4, .window_tokens = 150, .num_queries = 30};
  const PrefillScene scene(shape);
  DevicePrefill device(scene);
  const Result whole = device.Run();
  const size_t row = size_t{8} * 128;
  for (const uint32_t query : {0u, 13u, 29u}) {
    PrefillAttentionParams params = device.params();
    params.num_queries = 1;
    params.window_tokens = 150 - 29 + query;
    params.queries = static_cast<const BFloat16*>(params.queries) + query * row;
    ASSERT_TRUE(PrefillAttention(params, nullptr).ok());
    CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
    std::vector<float> got = device.out().Download();
    got.resize(row);
    const std::vector<float> expected(
        whole.out.begin() + static_cast<ptrdiff_t>(query * row),
        whole.out.begin() + static_cast<ptrdiff_t>((query + 1) * row));
    EXPECT_LT(WorstError(got, expected), 1e-5) << "query " << query;
  }
}

}  // namespace
}  // namespace crumb
