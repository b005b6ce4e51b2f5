// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/split_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "crumb/cuda/demote.h"
#include "tests/cuda/codec_testing.h"

namespace crumb {
namespace {

using testing::HasSubstr;

// Fast paths hold queries and probabilities as integers of 16 bits, or of 8 where no token of a
// page has more than 1/512 of the probability before it (docs/decisions/0020-digits-by-share.md).
// Over these shapes that stays below 1e-3 of the largest |v|; a wrong head, token or digit is off
// by 1e-2 and more.
constexpr double kTolerance = 1e-3;
constexpr double kLseTolerance = 1e-3;
// Where hundreds of pages are read with 8 bits, and values deviate by up to 2.7, as below: 1.5e-3
// was measured, over seeds 3 to 9.
constexpr double kLongTolerance = 2e-3;

struct alignas(64) Block {
  std::byte bytes[Int2HeadBlock{kMaxHeadDim, kMaxHeadDim}.bytes()];
};

struct Shape {
  uint32_t key_dim = 64;
  uint32_t value_dim = 64;
  uint32_t group = 1;
  uint32_t num_queries = 1;
  uint32_t num_pages = 0;
  std::vector<uint32_t> windows = {1};
  float key_deviation = 1;
};

void PrintTo(const Shape& shape, std::ostream* out) {
  *out << "dk " << shape.key_dim << " dv " << shape.value_dim << " group " << shape.group
       << " queries " << shape.num_queries << " pages " << shape.num_pages << " windows";
  for (const uint32_t tokens : shape.windows) {
    *out << " " << tokens;
  }
}

// One KV head's cache of random rows, and queries.
class Scene {
 public:
  explicit Scene(const Shape& shape, uint32_t seed = 1) : shape_(shape) {
    std::mt19937 random(seed);
    TestHead head(shape.key_dim, shape.value_dim, CodecId::kOscarInt2, seed);
    const size_t key_count = size_t{kPageTokens} * shape.key_dim;
    const size_t value_count = size_t{kPageTokens} * shape.value_dim;
    blocks_ = std::make_unique<Block[]>(shape.num_pages);
    for (uint32_t page = 0; page < shape.num_pages; ++page) {
      const auto keys =
          GaussianRows(key_count, shape.key_deviation, static_cast<uint32_t>(random()));
      auto values = GaussianRows(value_count, 1, static_cast<uint32_t>(random()));
      for (size_t i = 0; i < values.size(); ++i) {  // Rows and pages of unequal size.
        const auto factor = static_cast<float>(1 + (i / shape.value_dim) % 5 + 3 * (page % 3));
        values[i] = BFloat16::FromFloat(values[i].ToFloat() * factor / 4 + 0.5f);
      }
      const size_t bytes = Int2HeadBlock{shape.key_dim, shape.value_dim}.bytes();
      EXPECT_TRUE(DemoteHeadBlock(head.parameters(), keys, values, {blocks_[page].bytes, bytes},
                                  CpuPath::kReference)
                      .ok());
      history_.push_back(blocks_[page].bytes);
    }
    for (const uint32_t tokens : shape.windows) {
      keys_.push_back(GaussianRows(size_t{tokens} * shape.key_dim, shape.key_deviation,
                                   static_cast<uint32_t>(random())));
      values_.push_back(
          GaussianRows(size_t{tokens} * shape.value_dim, 1, static_cast<uint32_t>(random())));
    }
    for (size_t i = 0; i < shape.windows.size(); ++i) {
      windows_.push_back({keys_[i].data(), values_[i].data(), shape.windows[i]});
    }
    std::normal_distribution<float> normal(0, 1);
    queries_.resize(size_t{shape.num_queries} * shape.group * shape.key_dim);
    for (size_t i = 0; i < queries_.size(); ++i) {  // Heads of unequal size.
      const size_t query_head = i / shape.key_dim % shape.group;
      queries_[i] = normal(random) * static_cast<float>(1 + query_head % 3);
    }
  }
  Scene(const Scene&) = delete;
  Scene& operator=(const Scene&) = delete;

  const Shape& shape() const { return shape_; }
  std::vector<const std::byte*>& history() { return history_; }
  std::vector<Bf16Rows>& windows() { return windows_; }
  std::vector<float>& queries() { return queries_; }
  std::vector<BFloat16>& values(size_t window) { return values_[window]; }
  std::vector<BFloat16>& keys(size_t window) { return keys_[window]; }

  SplitAttentionParams Params(std::vector<float>& out, std::vector<float>& lse) const {
    const size_t rows = size_t{shape_.num_queries} * shape_.group;
    out.assign(rows * shape_.value_dim, std::numeric_limits<float>::quiet_NaN());
    lse.assign(rows, std::numeric_limits<float>::quiet_NaN());
    return {.key_dim = shape_.key_dim,
            .value_dim = shape_.value_dim,
            .num_queries = shape_.num_queries,
            .group = shape_.group,
            .scale = 1 / std::sqrt(static_cast<float>(shape_.key_dim)),
            .queries = queries_.data(),
            .history = history_,
            .windows = windows_,
            .out = out.data(),
            .lse = lse.data()};
  }

 private:
  Shape shape_;
  std::unique_ptr<Block[]> blocks_;
  std::vector<const std::byte*> history_;
  std::vector<std::vector<BFloat16>> keys_;
  std::vector<std::vector<BFloat16>> values_;
  std::vector<Bf16Rows> windows_;
  std::vector<float> queries_;
};

struct Output {
  std::vector<float> out;
  std::vector<float> lse;
};

Output Attend(const Scene& scene, CpuPath path) {
  Output output;
  const auto status = SplitAttention(scene.Params(output.out, output.lse), path);
  EXPECT_TRUE(status.ok()) << status;
  return output;
}

void ExpectNear(const Output& got,
                const Output& expected,
                std::string_view what,
                double tolerance = kTolerance) {
  ASSERT_EQ(got.out.size(), expected.out.size());
  double worst = 0;
  double largest = 1;
  size_t worst_at = 0;
  for (size_t i = 0; i < got.out.size(); ++i) {
    const double error = std::fabs(double{got.out[i]} - expected.out[i]);
    largest = std::max(largest, std::fabs(double{expected.out[i]}));
    if (!(error <= worst)) {  // A NaN is worst of all.
      worst = error;
      worst_at = i;
    }
  }
  EXPECT_LE(worst, tolerance * largest) << what << ": out[" << worst_at << "] is "
                                        << got.out[worst_at] << ", not " << expected.out[worst_at];
  for (size_t i = 0; i < got.lse.size(); ++i) {
    EXPECT_NEAR(got.lse[i], expected.lse[i],
                kLseTolerance * std::max(1.0f, std::fabs(expected.lse[i])))
        << what << ": lse[" << i << "]";
  }
}

class SplitAttentionTest : public testing::TestWithParam<Shape> {};

TEST_P(SplitAttentionTest, EveryPathMatchesTheTwin) {
  for (uint32_t seed = 1; seed <= 2; ++seed) {
    const Scene scene(GetParam(), seed);
    const Output expected = Attend(scene, CpuPath::kReference);
    for (const CpuPath path : FastPaths()) {
      ExpectNear(Attend(scene, path), expected, CpuPathName(path));
    }
  }
}

class LongSplitAttentionTest : public testing::TestWithParam<Shape> {};

TEST_P(LongSplitAttentionTest, EveryPathMatchesTheTwin) {
  for (uint32_t seed = 1; seed <= 2; ++seed) {
    const Scene scene(GetParam(), seed);
    const Output expected = Attend(scene, CpuPath::kReference);
    for (const CpuPath path : FastPaths()) {
      ExpectNear(Attend(scene, path), expected, CpuPathName(path), kLongTolerance);
    }
  }
}

// Enough pages that most are read with one digit, in batches, the last of which is not whole.
INSTANTIATE_TEST_SUITE_P(
    Shapes,
    LongSplitAttentionTest,
    testing::Values(Shape{.group = 4, .num_pages = 259, .windows = {1}},
                    Shape{.group = 3, .num_pages = 158, .windows = {64, 300}},
                    Shape{
                        .key_dim = 128, .value_dim = 96, .num_pages = 131, .windows = {64, 300}}));

std::vector<Shape> Shapes() {
  std::vector<Shape> shapes;
  for (const uint32_t group : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 9u, 12u, 16u, 33u, 64u}) {
    shapes.push_back({.key_dim = 128,
                      .value_dim = 128,
                      .group = group,
                      .num_pages = 3,
                      .windows = {64, 64, 37}});
    shapes.push_back({.group = group, .num_queries = 5, .num_pages = 2, .windows = {7}});
  }
  for (const auto& [key_dim, value_dim] : std::vector<std::pair<uint32_t, uint32_t>>{{32, 32},
                                                                                     {64, 64},
                                                                                     {96, 96},
                                                                                     {128, 128},
                                                                                     {256, 256},
                                                                                     {512, 512},
                                                                                     {160, 32},
                                                                                     {64, 128},
                                                                                     {192, 128}}) {
    for (const uint32_t num_queries : {1u, 3u}) {
      shapes.push_back({.key_dim = key_dim,
                        .value_dim = value_dim,
                        .group = 3,
                        .num_queries = num_queries,
                        .num_pages = 2,
                        .windows = {3, 17}});
    }
  }
  for (const std::vector<uint32_t>& windows : std::vector<std::vector<uint32_t>>{
           {1}, {0, 1, 0}, {15}, {16}, {17, 0, 1}, {64, 319}, {63, 64, 65}}) {
    for (const uint32_t num_pages : {0u, 1u, 5u}) {
      shapes.push_back({.group = 4, .num_pages = num_pages, .windows = windows});
    }
  }
  for (const uint32_t num_queries : {2u, 15u, 16u, 17u, 64u, 100u}) {
    shapes.push_back({.group = 3,
                      .num_queries = num_queries,
                      .num_pages = 4,
                      .windows = {64, 70, num_queries - 1}});
  }
  shapes.push_back({.group = 2, .num_pages = 70, .windows = {64, 300}});
  // Scores far apart: one token takes nearly all, and exponents span the range of float.
  shapes.push_back({.group = 4, .num_pages = 6, .windows = {64}, .key_deviation = 30});
  return shapes;
}

INSTANTIATE_TEST_SUITE_P(Shapes, SplitAttentionTest, testing::ValuesIn(Shapes()));

class SplitAttentionPathTest : public testing::TestWithParam<CpuPath> {
 protected:
  void SetUp() override {
    if (!CpuPathAvailable(GetParam())) {
      GTEST_SKIP() << "this processor has no " << CpuPathName(GetParam());
    }
  }
};

INSTANTIATE_TEST_SUITE_P(
    Paths,
    SplitAttentionPathTest,
    testing::Values(CpuPath::kReference, CpuPath::kPortable, CpuPath::kAvx2, CpuPath::kAvx512),
    [](const auto& param) { return std::string(CpuPathName(param.param)); });

TEST_P(SplitAttentionPathTest, TwoTokensByHand) {
  Scene scene({.windows = {2}});
  std::fill(scene.keys(0).begin(), scene.keys(0).end(), BFloat16{});
  std::fill(scene.values(0).begin(), scene.values(0).end(), BFloat16{});
  std::fill(scene.queries().begin(), scene.queries().end(), 0.0f);
  scene.queries()[5] = 8;  // Scale 1/8: the scores are the keys' channel 5.
  scene.keys(0)[5] = BFloat16::FromFloat(1);
  scene.keys(0)[64 + 5] = BFloat16::FromFloat(3);
  scene.values(0)[9] = BFloat16::FromFloat(10);
  scene.values(0)[64 + 9] = BFloat16::FromFloat(20);
  const Output output = Attend(scene, GetParam());
  const double second = 1 / (1 + std::exp(-2.0));
  EXPECT_NEAR(output.out[9], 10 + 10 * second, 1e-4);
  EXPECT_EQ(output.out[8], 0);
  EXPECT_NEAR(output.lse[0], 3 + std::log1p(std::exp(-2.0)), 1e-5);
}

// Query head x of a group looks for token x + 1 of each page alone, whose values say so: a head
// that reads another's digits, or a token in another's place, finds other values.
TEST_P(SplitAttentionPathTest, EachHeadFindsWhatWasPlantedForIt) {
  for (const uint32_t group : {1u, 3u, 4u, 6u, 12u, 48u}) {
    const Shape shape{.group = group, .num_pages = 2};
    Scene scene(shape);
    std::vector<BFloat16> keys(size_t{kPageTokens} * 64);
    std::vector<BFloat16> values(size_t{kPageTokens} * 64);
    for (uint32_t token = 0; token < kPageTokens; ++token) {
      keys[token * 64 + token] = BFloat16::FromFloat(1);
      for (uint32_t channel = 0; channel < 64; ++channel) {
        values[token * 64 + channel] = BFloat16::FromFloat(static_cast<float>(token));
      }
    }
    TestHead head(64, 64, CodecId::kOscarInt2);
    head.parameters().key_clip = 0;
    Block block;
    ASSERT_TRUE(DemoteHeadBlock(head.parameters(), keys, values,
                                {block.bytes, Int2HeadBlock{64, 64}.bytes()})
                    .ok());
    scene.history() = {block.bytes, block.bytes};
    std::fill(scene.queries().begin(), scene.queries().end(), 0.0f);
    std::fill(scene.keys(0).begin(), scene.keys(0).end(), BFloat16{});
    for (uint32_t x = 0; x < group; ++x) {
      scene.queries()[x * 64 + x + 1] = 8 * 40;
    }
    const Output output = Attend(scene, GetParam());
    for (uint32_t x = 0; x < group; ++x) {
      for (uint32_t channel = 0; channel < 64; ++channel) {
        EXPECT_NEAR(output.out[x * 64 + channel], static_cast<float>(x + 1), 0.01) << group;
      }
    }
  }
}

TEST_P(SplitAttentionPathTest, OrderOfHistoryDoesNotMatter) {
  Scene scene({.group = 2, .num_pages = 9, .windows = {3}});
  const Output forward = Attend(scene, GetParam());
  std::reverse(scene.history().begin(), scene.history().end());
  ExpectNear(Attend(scene, GetParam()), forward, "reversed");
}

TEST_P(SplitAttentionPathTest, ChunkIsCausal) {
  const Shape shape{.group = 3, .num_queries = 5, .num_pages = 2, .windows = {20, 4}};
  const Scene scene(shape);
  const Output together = Attend(scene, GetParam());
  for (uint32_t i = 0; i < shape.num_queries; ++i) {
    Output alone;
    auto params = scene.Params(alone.out, alone.lse);
    const size_t row = size_t{i} * shape.group;
    // The last query's own row is the second window's fourth; the first's is the first window's
    // last.
    const uint32_t visible = 24 - (shape.num_queries - 1 - i);
    std::vector<Bf16Rows> windows(params.windows.begin(), params.windows.end());
    windows[0].num_tokens = std::min(visible, 20u);
    windows[1].num_tokens = visible - windows[0].num_tokens;
    params.windows = windows;
    params.num_queries = 1;
    params.queries += row * shape.key_dim;
    ASSERT_TRUE(SplitAttention(params, GetParam()).ok());
    const Output expected{{alone.out.begin(), alone.out.begin() + 3 * 64},
                          {alone.lse.begin(), alone.lse.begin() + 3}};
    const auto first = together.out.begin() + static_cast<ptrdiff_t>(row * 64);
    const auto lse = together.lse.begin() + static_cast<ptrdiff_t>(row);
    ExpectNear({{first, first + 3 * 64}, {lse, lse + 3}}, expected, "query " + std::to_string(i));
  }
}

TEST_P(SplitAttentionPathTest, PartsMergeByTheirLse) {
  const Scene scene({.group = 2, .num_pages = 7, .windows = {30, 11}});
  const Output whole = Attend(scene, GetParam());
  Output parts[2];
  for (size_t part = 0; part < 2; ++part) {
    auto params = scene.Params(parts[part].out, parts[part].lse);
    params.history = part == 0 ? params.history.first(3) : params.history.subspan(3);
    params.windows = params.windows.subspan(part, 1);
    ASSERT_TRUE(SplitAttention(params, GetParam()).ok());
  }
  Output merged = whole;
  for (size_t row = 0; row < merged.lse.size(); ++row) {
    const double first = std::exp(double{parts[0].lse[row]} - whole.lse[row]);
    const double second = std::exp(double{parts[1].lse[row]} - whole.lse[row]);
    EXPECT_NEAR(first + second, 1, 1e-3);
    for (size_t i = row * 64; i < (row + 1) * 64; ++i) {
      merged.out[i] = static_cast<float>(parts[0].out[i] * first + parts[1].out[i] * second);
    }
  }
  ExpectNear(merged, whole, "merged");
}

TEST_P(SplitAttentionPathTest, ZeroQueryAveragesValues) {
  Scene scene({.num_pages = 2, .windows = {5}});
  std::fill(scene.queries().begin(), scene.queries().end(), 0.0f);
  const Output output = Attend(scene, GetParam());
  EXPECT_NEAR(output.lse[0], std::log(2.0 * kPageTokens + 5), 1e-4);
}

TEST_P(SplitAttentionPathTest, LseMayBeLeftOut) {
  const Scene scene({.group = 3, .num_pages = 1});
  Output with;
  Output without;
  ASSERT_TRUE(SplitAttention(scene.Params(with.out, with.lse), GetParam()).ok());
  auto params = scene.Params(without.out, without.lse);
  params.lse = nullptr;
  ASSERT_TRUE(SplitAttention(params, GetParam()).ok());
  EXPECT_EQ(with.out, without.out);
}

TEST(SplitAttentionErrorTest, NamesFieldValueAndLimit) {
  const Scene scene({.group = 2, .num_pages = 1, .windows = {4}});
  Output output;
  const auto expect = [&](auto change, std::string_view message) {
    auto params = scene.Params(output.out, output.lse);
    std::vector<Bf16Rows> windows(params.windows.begin(), params.windows.end());
    std::vector<const std::byte*> history(params.history.begin(), params.history.end());
    change(params, windows, history);
    params.windows = windows;
    params.history = history;
    const auto status = SplitAttention(params);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(message)));
  };
  expect([](auto& p, auto&, auto&) { p.key_dim = 40; },
         "key_dim is 40; it must be a multiple of 32");
  expect([](auto& p, auto&, auto&) { p.value_dim = 544; }, "value_dim is 544");
  expect([](auto& p, auto&, auto&) { p.group = 0; }, "group is 0; it must be from 1 to 64");
  expect([](auto& p, auto&, auto&) { p.group = 65; }, "group is 65");
  expect([](auto& p, auto&, auto&) { p.num_queries = 5; },
         "num_queries is 5; it must be from 1 to the 4");
  expect([](auto& p, auto&, auto&) { p.num_queries = 0; }, "num_queries is 0");
  expect([](auto& p, auto&, auto&) { p.scale = NAN; }, "scale is nan");
  expect([](auto& p, auto&, auto&) { p.queries = nullptr; }, "queries is null");
  expect([](auto& p, auto&, auto&) { p.out = nullptr; }, "out is null");
  expect([](auto&, auto& windows, auto&) { windows[0].values = nullptr; },
         "windows[0] has 4 tokens but a null values");
  expect([](auto&, auto&, auto& history) { history[0] += 8; }, "history[0] is at address");
  expect([](auto&, auto&, auto& history) { history[0] = nullptr; }, "history[0] is at address 0");
}

}  // namespace
}  // namespace crumb
