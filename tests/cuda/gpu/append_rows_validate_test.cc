// SPDX-License-Identifier: Apache-2.0
//
// What append_rows refuses before it looks at a device, and its twin against the op for the CPU.
#include <cstring>
#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "crumb/cuda/rotate.h"
#include "tests/cuda/gpu/append_scene.h"

namespace crumb {
namespace {

using testing::HasSubstr;

alignas(256) std::byte g_memory[256];

struct BadParams {
  const char* name;
  std::function<void(AppendRowsParams&)> spoil;
  std::vector<const char*> words;
};

class ValidateAppendRowsTest : public testing::TestWithParam<BadParams> {};

TEST_P(ValidateAppendRowsTest, NamesTheFieldItsValueAndTheLimit) {
  const AppendScene scene({.dim = 64, .num_tokens = 4});
  auto* words = reinterpret_cast<uint32_t*>(g_memory);
  AppendRowsParams params =
      scene.Params(1, reinterpret_cast<uint16_t*>(g_memory), reinterpret_cast<uint16_t*>(g_memory),
                   reinterpret_cast<std::byte* const*>(g_memory), words, words);
  params.heads.records = g_memory;
  params.tokens_left_out = reinterpret_cast<uint64_t*>(g_memory);
  ASSERT_TRUE(ValidateAppendRows(params).ok()) << ValidateAppendRows(params);
  GetParam().spoil(params);
  const absl::Status status = AppendRows(params, nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  for (const char* word : GetParam().words) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(word));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Fields,
    ValidateAppendRowsTest,
    testing::Values(
        BadParams{"Layer", [](auto& p) { p.layer = 2; }, {"layer is 2", "below 2"}},
        BadParams{"Heads", [](auto& p) { p.first_head = 1; }, {"num_kv_heads is 2 from 1"}},
        BadParams{"Queries", [](auto& p) { p.num_query_heads = 5; }, {"num_query_heads is 5"}},
        BadParams{"Tokens", [](auto& p) { p.num_tokens = 40000; }, {"40000", "32768"}},
        BadParams{"Type", [](auto& p) { p.type = ElementType::kFloat32; }, {"type is 3"}},
        BadParams{"Keys", [](auto& p) { p.keys.data = nullptr; }, {"keys.data is at address 0"}},
        BadParams{"KeysAlone", [](auto& p) { p.values.data = nullptr; }, {"values.data is at"}},
        BadParams{"Nothing",
                  [](auto& p) {
                    p.keys.data = p.values.data = nullptr;
                    p.num_query_heads = 0;
                  },
                  {"keys.data is at address 0"}},
        BadParams{"Stride", [](auto& p) { p.values.token_stride = 4; }, {"values.token_stride"}},
        BadParams{"Out", [](auto& p) { p.rotated_queries = nullptr; }, {"rotated_queries"}},
        BadParams{"Pages", [](auto& p) { p.pages = nullptr; }, {"pages is at address 0"}},
        BadParams{"NoPages", [](auto& p) { p.stride = 0; }, {"stride is 0"}},
        BadParams{"Slots", [](auto& p) { p.slots = nullptr; }, {"slots is at address 0"}},
        BadParams{"Count", [](auto& p) { p.tokens_left_out = nullptr; }, {"tokens_left_out"}}),
    [](const auto& bad) { return std::string(bad.param.name); });

TEST(AppendRowsReferenceTest, IsTheRotationOfEachRow) {
  constexpr uint32_t kDim = 64;
  AppendScene scene({kDim, 2, 3, 7, ElementType::kBf16});
  std::vector<std::byte> windows(scene.pages().num_pages() * scene.pages().bf16_bytes());
  std::vector<uint16_t> queries(scene.query_elements());
  const auto table = scene.pages().Table(windows.data(), scene.pages().bf16_bytes());
  ASSERT_TRUE(AppendRowsReference(scene.Params(1, scene.rows().data(), queries.data(), table.data(),
                                               scene.sequences().data(), scene.slots().data()),
                                  scene.pages().heads())
                  .ok());
  for (uint32_t token = 0; token < 7; ++token) {
    const auto row = [&](uint32_t index) {
      std::vector<float> floats(kDim);
      for (uint32_t i = 0; i < kDim; ++i) {
        floats[i] = BFloat16{scene.rows()[(token * 10 + index) * kDim + i]}.ToFloat();
      }
      return floats;
    };
    for (uint32_t kv = 0; kv < 2; ++kv) {
      const HeadParameters& head = scene.pages().heads()[2 + kv];
      for (uint32_t query = 3 * kv; query < 3 * kv + 3; ++query) {
        std::vector<float> rotated(kDim);
        RotateQueries(head, row(query), rotated, CpuPath::kReference);
        for (uint32_t i = 0; i < kDim; ++i) {
          EXPECT_EQ(queries[(token * 6 + query) * kDim + i], BFloat16::FromFloat(rotated[i]).bits);
        }
      }
      const uint32_t slot = scene.slots()[token];
      if (slot == AppendRowsParams::kNoSlot) {
        continue;
      }
      const size_t page = (6 - token) * AppendScene::kStride + slot / kPageTokens;
      const std::byte* block =
          table[page] + scene.pages().geometry().HeadBlockOffset(PageEncoding::kBf16, 1, kv);
      std::vector<BFloat16> rotated(kDim);
      RotateKeys(head, row(6 + kv), rotated, CpuPath::kReference);
      EXPECT_EQ(std::memcmp(block + slot % kPageTokens * kDim * 2, rotated.data(), kDim * 2), 0);
      RotateValues(head, row(8 + kv), rotated, CpuPath::kReference);
      EXPECT_EQ(std::memcmp(block + (kPageTokens + slot % kPageTokens) * kDim * 2, rotated.data(),
                            kDim * 2),
                0);
    }
  }
}

}  // namespace
}  // namespace crumb
