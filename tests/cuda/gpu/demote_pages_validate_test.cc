// SPDX-License-Identifier: Apache-2.0
//
// What demotion refuses before it looks at a device, and its twin against the op for the CPU.
#include <cstring>
#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "crumb/cuda/demote.h"
#include "crumb/cuda/demote_pages.h"
#include "crumb/cuda/device_profile.h"
#include "crumb/cuda/rotate.h"
#include "cuda/launch/demote_finding.h"
#include "tests/cuda/gpu/page_scene.h"

namespace crumb {
namespace {

using testing::HasSubstr;

alignas(256) std::byte g_memory[256];

DemotePagesParams ValidParams() {
  const PageScene scene({2, 2, 64, 64}, CodecId::kOscarInt2, 3);
  DemotePagesParams params = scene.Demotion(reinterpret_cast<const std::byte* const*>(g_memory),
                                            reinterpret_cast<std::byte* const*>(g_memory));
  params.heads.records = g_memory;
  params.finding = reinterpret_cast<uint64_t*>(g_memory);
  return params;
}

struct BadParams {
  const char* name;
  std::function<void(DemotePagesParams&)> spoil;
  std::vector<const char*> words;
};

class ValidateDemotePagesTest : public testing::TestWithParam<BadParams> {};

TEST_P(ValidateDemotePagesTest, NamesTheFieldItsValueAndTheLimit) {
  DemotePagesParams params = ValidParams();
  ASSERT_TRUE(ValidateDemotePages(params).ok()) << ValidateDemotePages(params);
  GetParam().spoil(params);
  const absl::Status status = DemotePages(params, nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  for (const char* word : GetParam().words) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(word));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Fields,
    ValidateDemotePagesTest,
    testing::Values(
        BadParams{"HeadDim", [](auto& p) { p.heads.head_dim = 96; }, {"head_dim is 96", "128"}},
        BadParams{"Records", [](auto& p) { p.heads.records = nullptr; }, {"heads.records"}},
        BadParams{"NoPages", [](auto& p) { p.num_pages = 0; }, {"num_pages is 0", "from 1"}},
        BadParams{"Pages",
                  [](auto& p) { p.num_pages = 1u << 31; },
                  {"num_pages is 2147483648", "268435456"}},
        BadParams{"Layers", [](auto& p) { p.first_layer = 1; }, {"num_layers is 2 from 1", "to 1"}},
        BadParams{"Heads", [](auto& p) { p.first_head = 9; }, {"num_heads is 2 from 9"}},
        BadParams{"Keys", [](auto& p) { p.keys.pages = nullptr; }, {"keys.pages", "not null"}},
        BadParams{"Stride",
                  [](auto& p) { p.values.token_stride = 130; },
                  {"values.token_stride is 130", "multiple of 16"}},
        BadParams{"Block",
                  [](auto& p) { p.int2.head_stride = 8; },
                  {"int2.head_stride is 8", "multiple of 16"}},
        BadParams{"Finding", [](auto& p) { p.finding = nullptr; }, {"finding is at address 0"}}),
    [](const auto& bad) { return std::string(bad.param.name); });

TEST(DemotePagesTest, HeadsThatOnlyTheCpuDemotesAreRefused) {
  DemotePagesParams params = ValidParams();
  params.heads.is_demoted_on_cpu = true;
  const absl::Status status = DemotePages(params, nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("demote these pages on the CPU"));
  HeadParameters head = PageScene({1, 1, 64, 64}, CodecId::kOscarInt2Tilted, 1).heads()[0];
  EXPECT_TRUE(HasDemotionKernel(head));
  head.key_ranges[1] = 0.94f;
  EXPECT_FALSE(HasDemotionKernel(head));
  head.codec = CodecId::kOscarInt2;  // It has none to try.
  EXPECT_TRUE(HasDemotionKernel(head));
}

TEST(DemotePagesReferenceTest, IsRotationAndDemotionOfEachHeadBlock) {
  constexpr uint32_t kDim = 64;
  for (const CodecId codec : {CodecId::kOscarInt2, CodecId::kOscarInt2Aware}) {
    const PageScene scene({2, 2, kDim, kDim}, codec, 2);
    const std::vector<BFloat16> rows = scene.RandomRows(1);
    std::vector<std::byte> got(scene.num_pages() * scene.int2_bytes());
    const auto from =
        scene.Table(reinterpret_cast<const std::byte*>(rows.data()), scene.bf16_bytes());
    const auto to = scene.Table(got.data(), scene.int2_bytes());
    ASSERT_TRUE(DemotePagesReference(scene.Demotion(from.data(), to.data()), scene.heads()).ok());
    const size_t elements = size_t{kPageTokens} * kDim;
    std::vector<std::byte> expected(got.size());
    for (size_t block = 0; block < scene.num_pages() * scene.heads().size(); ++block) {
      const size_t in_page = block % scene.heads().size();
      const HeadParameters& head = scene.heads()[in_page % 2 * 2 + in_page / 2];
      std::vector<float> floats(2 * elements);
      for (size_t i = 0; i < floats.size(); ++i) {
        floats[i] = rows[block * 2 * elements + i].ToFloat();
      }
      std::vector<BFloat16> stored(2 * elements);
      RotateKeys(head, std::span(floats).first(elements), std::span(stored).first(elements),
                 CpuPath::kReference);
      RotateValues(head, std::span(floats).last(elements), std::span(stored).last(elements),
                   CpuPath::kReference);
      const size_t bytes = Int2HeadBlock{kDim, kDim}.bytes();
      ASSERT_TRUE(
          DemoteHeadBlock(head, std::span(stored).first(elements), std::span(stored).last(elements),
                          std::span(expected).subspan(block * bytes, bytes), CpuPath::kReference)
              .ok());
    }
    EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.size()), 0);
  }
}

TEST(DemotePagesReferenceTest, RowsThatAreNotFiniteAreNamed) {
  const PageScene scene({2, 2, 64, 64}, CodecId::kOscarInt2, 2);
  std::vector<BFloat16> rows = scene.RandomRows(1);
  rows[scene.bf16_bytes() / 2 + (kPageTokens + 3) * 64 + 1] = BFloat16{0x7f80};
  std::vector<std::byte> int2(scene.num_pages() * scene.int2_bytes());
  const auto from =
      scene.Table(reinterpret_cast<const std::byte*>(rows.data()), scene.bf16_bytes());
  const auto to = scene.Table(int2.data(), scene.int2_bytes());
  const absl::Status status =
      DemotePagesReference(scene.Demotion(from.data(), to.data()), scene.heads());
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("V holds NaN or inf at page 1 of the launch, layer 0, KV head 0, token 3"));
}

TEST(DemotePagesReferenceTest, NullPagesAreNamedAndNothingIsWritten) {
  const PageScene scene({1, 1, 64, 64}, CodecId::kOscarInt2, 2);
  const std::vector<BFloat16> rows = scene.RandomRows(1);
  std::vector<std::byte> int2(scene.num_pages() * scene.int2_bytes(), std::byte{0xee});
  const auto untouched = int2;
  const auto from =
      scene.Table(reinterpret_cast<const std::byte*>(rows.data()), scene.bf16_bytes());
  const auto to = scene.Table(int2.data(), scene.int2_bytes());
  auto without_source = from;
  auto without_target = to;
  without_source[1] = nullptr;
  without_target[0] = nullptr;
  const auto message = [&](const DemotePagesParams& params) {
    return std::string(DemotePagesReference(params, scene.heads()).message());
  };
  DemotePagesParams params = scene.Demotion(from.data(), to.data());
  params.keys.pages = without_source.data();
  EXPECT_THAT(message(params), HasSubstr("keys.pages[1] is null"));
  params = scene.Demotion(from.data(), to.data());
  params.values.pages = without_source.data();
  EXPECT_THAT(message(params), HasSubstr("values.pages[1] is null"));
  EXPECT_THAT(message(scene.Demotion(from.data(), without_target.data())),
              HasSubstr("int2.pages[0] is null"));
  EXPECT_TRUE(int2 == untouched);
}

// Findings of several threads are combined by their maximum.
TEST(DescribeDemoteFindingTest, NullPagesWinThenTheFirstRow) {
  const DemotePagesParams params = ValidParams();
  const auto describe = [&](uint64_t finding) {
    return std::string(DescribeDemoteFinding(params, finding).message());
  };
  const uint64_t later_page = gpu::NullPageFinding(268435455, gpu::DemoteTable::kInt2);
  const uint64_t page = gpu::NullPageFinding(7, gpu::DemoteTable::kValues);
  const uint64_t first_row = gpu::NonFiniteRowFinding(0);
  const uint64_t later_row = gpu::NonFiniteRowFinding((uint64_t{1} << 38) - 1);
  EXPECT_GT(page, later_page);
  EXPECT_GT(later_page, first_row);
  EXPECT_GT(first_row, later_row);
  EXPECT_GT(later_row, 0u);
  EXPECT_THAT(describe(page), HasSubstr("values.pages[7] is null"));
  EXPECT_THAT(describe(later_page), HasSubstr("int2.pages[268435455] is null"));
  EXPECT_THAT(describe(first_row), HasSubstr("K holds NaN or inf at page 0 of the launch, layer "));
  EXPECT_THAT(describe(later_row), HasSubstr("token 63 of the page"));
  EXPECT_TRUE(DescribeDemoteFinding(params, 0).ok());
}

}  // namespace
}  // namespace crumb
