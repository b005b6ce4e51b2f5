// SPDX-License-Identifier: Apache-2.0
//
// What expansion refuses before it looks at a device, and its twin against the op for the CPU.
#include <cstring>
#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "crumb/cuda/expand_pages.h"
#include "proto/base/float16.h"
#include "tests/cuda/gpu/expand_scene.h"

namespace crumb {
namespace {

using testing::HasSubstr;

alignas(256) std::byte g_memory[256];

ExpandPagesParams ValidParams() {
  const PageScene scene({2, 2, 64, 64}, CodecId::kOscarInt2, 3);
  const EngineCache cache(scene, {CacheOrder::kNhd, 16, 0, 3 * kPageTokens});
  ExpandPagesParams params =
      cache.Params(reinterpret_cast<const std::byte* const*>(g_memory),
                   reinterpret_cast<std::byte* const*>(g_memory),
                   reinterpret_cast<const int32_t*>(g_memory), ExpandSpace::kModel);
  params.heads.records = g_memory;
  params.rows_left_out = reinterpret_cast<uint64_t*>(g_memory);
  return params;
}

struct BadParams {
  const char* name;
  std::function<void(ExpandPagesParams&)> spoil;
  std::vector<const char*> words;
};

class ValidateExpandPagesTest : public testing::TestWithParam<BadParams> {};

TEST_P(ValidateExpandPagesTest, NamesTheFieldItsValueAndTheLimit) {
  ExpandPagesParams params = ValidParams();
  ASSERT_TRUE(ValidateExpandPages(params).ok()) << ValidateExpandPages(params);
  GetParam().spoil(params);
  const absl::Status status = ExpandPages(params, nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  for (const char* word : GetParam().words) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(word));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Fields,
    ValidateExpandPagesTest,
    testing::Values(
        BadParams{"HeadDim", [](auto& p) { p.heads.head_dim = 32; }, {"head_dim is 32", "128"}},
        BadParams{"Layers", [](auto& p) { p.num_layers = 3; }, {"num_layers is 3 from 0", "to 2"}},
        BadParams{"Tokens", [](auto& p) { p.num_tokens = 193; }, {"num_tokens is 193", "192"}},
        BadParams{"NoTokens", [](auto& p) { p.num_tokens = 0; }, {"num_tokens is 0", "from 1"}},
        BadParams{"Position",
                  [](auto& p) { p.first_position = ~0u; },
                  {"first_position is 4294967295", "4294967296"}},
        BadParams{"BlockTokens", [](auto& p) { p.block_tokens = 0; }, {"block_tokens is 0"}},
        BadParams{"Blocks", [](auto& p) { p.num_blocks = 0; }, {"num_blocks is 0"}},
        BadParams{"Table", [](auto& p) { p.block_table = nullptr; }, {"block_table is at"}},
        BadParams{"Stride",
                  [](auto& p) { p.values.head_stride = 8; },
                  {"values.head_stride is 8", "multiple of 16"}},
        BadParams{"Source", [](auto& p) { p.int2.pages = nullptr; }, {"int2.pages"}},
        BadParams{"Count", [](auto& p) { p.rows_left_out = nullptr; }, {"rows_left_out"}}),
    [](const auto& bad) { return std::string(bad.param.name); });

TEST(ExpandPagesReferenceTest, IsExpansionOfEachHeadBlockAndAWalkOverTheCache) {
  for (const CacheOrder order : {CacheOrder::kNhd, CacheOrder::kHnd}) {
    const PageScene scene({2, 2, 64, 64}, CodecId::kOscarInt2, 2);
    const auto pages = RandomInt2Pages(scene, 7);
    EngineCache cache(scene, {order, 16, 5, kPageTokens + 20});
    std::vector<std::byte> got(cache.bytes(), std::byte{1});
    const auto table = scene.Table(pages.data(), scene.int2_bytes());
    const auto layers = cache.Layers(got.data());
    ASSERT_TRUE(ExpandPagesReference(cache.Params(table.data(), layers.data(), cache.table().data(),
                                                  ExpandSpace::kModel),
                                     scene.heads())
                    .ok());
    size_t written = 0;
    for (uint32_t token = 0; token < kPageTokens + 20; ++token) {
      const uint32_t position = 5 + token;
      const auto block = static_cast<size_t>(cache.table()[position / 16]);
      for (uint32_t layer = 0; layer < 2; ++layer) {
        for (uint32_t head = 0; head < 2; ++head) {
          std::vector<BFloat16> keys(size_t{kPageTokens} * 64);
          std::vector<BFloat16> values(keys.size());
          const std::byte* from =
              pages.data() + token / kPageTokens * scene.int2_bytes() +
              scene.geometry().HeadBlockOffset(PageEncoding::kInt2, layer, head);
          ExpandHeadBlock(scene.heads()[layer * 2 + head],
                          {from, scene.geometry().Int2Block().bytes()}, ExpandSpace::kModel, keys,
                          values, CpuPath::kReference);
          for (const bool is_value : {false, true}) {
            // [block][K or V][token][head] or [head][token], rows of 128 bytes.
            const size_t in_block =
                order == CacheOrder::kNhd ? position % 16 * 2 + head : head * 16 + position % 16;
            const size_t row = (block * 2 + (is_value ? 1 : 0)) * 32 + in_block;
            const auto& rows = is_value ? values : keys;
            EXPECT_EQ(std::memcmp(got.data() + layer * cache.layer_bytes() + row * 128,
                                  rows.data() + token % kPageTokens * 64, 128),
                      0);
            written += 128;
          }
        }
      }
    }
    const auto untouched = std::count(got.begin(), got.end(), std::byte{1});
    EXPECT_GE(static_cast<size_t>(untouched), got.size() - written);
  }
}

TEST(ExpandPagesReferenceTest, RowsOfNullPagesAndLayersAreLeftOutAndCounted) {
  const PageScene scene({2, 3, 64, 64}, CodecId::kOscarInt2, 2);
  const auto pages = RandomInt2Pages(scene, 7);
  EngineCache cache(scene, {CacheOrder::kNhd, 16, 0, kPageTokens + 20});
  std::vector<std::byte> got(cache.bytes(), std::byte{1});
  auto table = scene.Table(pages.data(), scene.int2_bytes());
  auto layers = cache.Layers(got.data());
  table[1] = nullptr;
  layers[0] = nullptr;
  const absl::Status status = ExpandPagesReference(
      cache.Params(table.data(), layers.data(), cache.table().data(), ExpandSpace::kModel),
      scene.heads());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  // Of K and V of three heads, layer 0's 84 tokens and layer 1's last 20.
  EXPECT_THAT(std::string(status.message()), HasSubstr("left out 624 rows"));
  const auto untouched = std::count(got.begin(), got.end(), std::byte{1});
  EXPECT_GE(static_cast<size_t>(untouched), got.size() - size_t{2} * 3 * 64 * 128);
  EXPECT_LT(static_cast<size_t>(untouched), got.size() - size_t{2} * 3 * 64 * 128 * 9 / 10);
}

}  // namespace
}  // namespace crumb
