// SPDX-License-Identifier: Apache-2.0
//
// What prefill attention refuses before it looks at a device, and its twin against the CPU's op.
#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "crumb/cuda/split_attention.h"
#include "tests/cuda/gpu/prefill_scene.h"

namespace crumb {
namespace {

using testing::HasSubstr;

alignas(256) std::byte g_memory[256];

struct BadParams {
  const char* name;
  std::function<void(PrefillAttentionParams&)> spoil;
  std::vector<const char*> words;
};

class ValidatePrefillAttentionTest : public testing::TestWithParam<BadParams> {};

TEST_P(ValidatePrefillAttentionTest, NamesTheFieldItsValueAndTheLimit) {
  const PrefillScene scene({.dim = 64, .history_pages = 2, .window_tokens = 70, .num_queries = 10});
  const auto* table = reinterpret_cast<const std::byte* const*>(g_memory);
  auto* floats = reinterpret_cast<float*>(g_memory);
  PrefillAttentionParams params = scene.Params(g_memory, table, table, floats, floats);
  ASSERT_TRUE(ValidatePrefillAttention(params).ok()) << ValidatePrefillAttention(params);
  GetParam().spoil(params);
  const absl::Status status = PrefillAttention(params, nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  for (const char* word : GetParam().words) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(word));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Fields,
    ValidatePrefillAttentionTest,
    testing::Values(
        BadParams{"Queries", [](auto& p) { p.num_queries = 0; }, {"num_queries is 0"}},
        BadParams{
            "Heads", [](auto& p) { p.num_query_heads = 5; }, {"num_query_heads is 5", "2 KV"}},
        BadParams{"HeadDim", [](auto& p) { p.head_dim = 80; }, {"head_dim is 80", "128"}},
        BadParams{"Scale", [](auto& p) { p.scale = INFINITY; }, {"scale is inf"}},
        BadParams{"NoQueries", [](auto& p) { p.queries = nullptr; }, {"queries is at address 0"}},
        BadParams{"QueryType",
                  [](auto& p) { p.query_type = ElementType::kFloat32; },
                  {"query_type is 3", "kFp16"}},
        BadParams{"OutType",
                  [](auto& p) { p.out_type = static_cast<ElementType>(9); },
                  {"out_type is 9"}},
        BadParams{"Out", [](auto& p) { p.out = nullptr; }, {"out is at address 0"}},
        BadParams{"History",
                  [](auto& p) { p.history_pages = 3; },
                  {"history_pages is 3", "history.stride, 2"}},
        BadParams{"Stride",
                  [](auto& p) { p.history.head_stride = 8; },
                  {"history.head_stride is 8", "multiple of 16"}},
        BadParams{"Windows", [](auto& p) { p.windows.pages = nullptr; }, {"windows.pages"}},
        BadParams{"FewTokens", [](auto& p) { p.window_tokens = 9; }, {"window_tokens is 9", "10"}},
        BadParams{
            "ManyTokens", [](auto& p) { p.window_tokens = 129; }, {"window_tokens is 129", "128"}}),
    [](const auto& bad) { return std::string(bad.param.name); });

TEST(PrefillAttentionReferenceTest, IsSplitAttentionOfEachKvHead) {
  const PrefillScene scene({.dim = 64,
                            .num_kv_heads = 2,
                            .group = 3,
                            .history_pages = 2,
                            .window_tokens = 70,
                            .num_queries = 6});
  const auto history = scene.HistoryTable(scene.int2().data());
  const auto windows = scene.WindowTable(scene.windows().data());
  std::vector<float> out(scene.num_rows() * 64);
  std::vector<float> lse(scene.num_rows());
  const PrefillAttentionParams params =
      scene.Params(scene.queries().data(), history.data(), windows.data(), out.data(), lse.data());
  ASSERT_TRUE(PrefillAttentionReference(params).ok());
  const Bf16HeadBlock format{64, 64};
  for (uint32_t kv = 0; kv < 2; ++kv) {
    std::vector<const std::byte*> blocks;
    for (const std::byte* page : history) {
      blocks.push_back(page + params.history.block_offset + kv * params.history.head_stride);
    }
    std::vector<Bf16Rows> rows;
    for (const std::byte* page : windows) {
      const std::byte* block = page + params.windows.block_offset + kv * params.windows.head_stride;
      rows.push_back({reinterpret_cast<const BFloat16*>(block),
                      reinterpret_cast<const BFloat16*>(block + format.value_offset()),
                      rows.empty() ? 64u : 6u});
    }
    std::vector<float> queries;
    for (uint32_t query = 0; query < 6; ++query) {
      for (uint32_t i = 0; i < 3 * 64; ++i) {
        queries.push_back(BFloat16{scene.queries()[(query * 6 + kv * 3) * 64 + i]}.ToFloat());
      }
    }
    std::vector<float> expected(queries.size());
    ASSERT_TRUE(SplitAttention({.key_dim = 64,
                                .value_dim = 64,
                                .num_queries = 6,
                                .group = 3,
                                .scale = params.scale,
                                .queries = queries.data(),
                                .history = blocks,
                                .windows = rows,
                                .out = expected.data()},
                               CpuPath::kReference)
                    .ok());
    for (uint32_t query = 0; query < 6; ++query) {
      for (uint32_t i = 0; i < 3 * 64; ++i) {
        EXPECT_EQ(out[(query * 6 + kv * 3) * 64 + i], expected[query * 3 * 64 + i]);
      }
    }
  }
}

}  // namespace
}  // namespace crumb
