// SPDX-License-Identifier: Apache-2.0
//
// What split and shared decode refuse before they look at a device.
#include <cmath>
#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "crumb/cuda/shared_decode.h"
#include "crumb/cuda/split_decode.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;

alignas(256) std::byte g_memory[256];

SplitDecodeParams ValidParams() {
  SplitDecodeParams params;
  params.num_sequences = 1;
  params.num_query_heads = 8;
  params.num_kv_heads = 2;
  params.head_dim = 128;
  params.scale = 0.1f;
  params.queries = g_memory;
  params.out = g_memory;
  params.history.pages = reinterpret_cast<const std::byte* const*>(g_memory);
  params.history.stride = 4;
  params.history_pages = reinterpret_cast<const uint32_t*>(g_memory);
  params.windows = params.history;
  params.window_tokens = params.history_pages;
  params.workspace = g_memory;
  return params;
}

struct BadParams {
  const char* name;
  std::function<void(SplitDecodeParams&)> spoil;
  std::vector<const char*> words;
};

class ValidateSplitDecodeTest : public testing::TestWithParam<BadParams> {};

TEST_P(ValidateSplitDecodeTest, NamesTheFieldItsValueAndTheLimit) {
  SplitDecodeParams params = ValidParams();
  ASSERT_TRUE(ValidateSplitDecode(params).ok());
  GetParam().spoil(params);
  const absl::Status status = SplitDecode(params, nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  for (const char* word : GetParam().words) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(word));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Fields,
    ValidateSplitDecodeTest,
    testing::Values(
        BadParams{
            "NoSequence", [](auto& p) { p.num_sequences = 0; }, {"num_sequences is 0", "1 to"}},
        BadParams{"NoKvHead", [](auto& p) { p.num_kv_heads = 0; }, {"num_kv_heads is 0", "64"}},
        BadParams{"HeadsThatDoNotDivide",
                  [](auto& p) { p.num_query_heads = 9; },
                  {"num_query_heads is 9", "multiple of the 2"}},
        BadParams{"TooManyQueryHeads",
                  [](auto& p) { p.num_query_heads = 34; },
                  {"num_query_heads is 34", "16"}},
        BadParams{
            "HeadDim", [](auto& p) { p.head_dim = 96; }, {"head_dim is 96", "64, 128 and 256"}},
        BadParams{"Scale", [](auto& p) { p.scale = NAN; }, {"scale is nan", "1 / sqrt"}},
        BadParams{"QueryType",
                  [](auto& p) { p.query_type = ElementType::kFloat32; },
                  {"query_type is 3", "kFp16"}},
        BadParams{"OutType",
                  [](auto& p) { p.out_type = static_cast<ElementType>(9); },
                  {"out_type is 9", "kFloat32"}},
        BadParams{"NullQueries", [](auto& p) { p.queries = nullptr; }, {"queries", "not null"}},
        BadParams{"CrookedOut", [](auto& p) { p.out = g_memory + 2; }, {"out is at", "16 bytes"}},
        BadParams{"NoTable", [](auto& p) { p.history.pages = nullptr; }, {"history.pages", "null"}},
        BadParams{
            "NoLengths", [](auto& p) { p.window_tokens = nullptr; }, {"window_tokens", "null"}},
        BadParams{"HugeTable",
                  [](auto& p) { p.history.stride = 1u << 29; },
                  {"history.stride is 536870912", "268435456"}},
        BadParams{"WindowsOfMoreRowsThanTheirLengthsCanSay",
                  [](auto& p) { p.windows.stride = 1u << 26; },
                  {"windows.stride is 67108864", "33554432"}},
        BadParams{"CrookedStride",
                  [](auto& p) { p.history.head_stride = 4609; },
                  {"history", "4609", "multiples"}},
        BadParams{
            "NoWorkspace", [](auto& p) { p.workspace = nullptr; }, {"workspace", "256 bytes"}}),
    [](const auto& test) { return std::string(test.param.name); });

TEST(ValidateSplitDecodeTest, TablesWithoutPagesNeedNoPointers) {
  SplitDecodeParams params = ValidParams();
  params.history = {};
  params.history_pages = nullptr;
  EXPECT_TRUE(ValidateSplitDecode(params).ok());
}

TEST(ValidateSharedDecodeTest, NamesWhatIsWrongWithThePrefix) {
  SharedDecodeParams params;
  params.batch = ValidParams();
  params.prefix = params.batch.history;
  params.prefix_pages = params.batch.history_pages;
  ASSERT_TRUE(ValidateSharedDecode(params).ok());
  const auto refusal = [](SharedDecodeParams bad) {
    const absl::Status status = SharedDecode(bad, nullptr);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  SharedDecodeParams bad = params;
  bad.prefix.stride = 0;
  EXPECT_THAT(refusal(bad), HasSubstr("prefix.stride is 0"));
  bad = params;
  bad.prefix_pages = nullptr;
  EXPECT_THAT(refusal(bad), HasSubstr("prefix_pages"));
  bad = params;
  bad.prefix.head_stride = 4608;
  EXPECT_THAT(refusal(bad), HasSubstr("head_stride 4608"));
  bad = params;
  bad.batch.head_dim = 80;
  EXPECT_THAT(refusal(bad), HasSubstr("head_dim is 80"));
  bad = params;
  bad.batch.num_query_heads = 16 * bad.batch.num_kv_heads;
  bad.batch.num_sequences = 65535 * 128 / 16;
  EXPECT_TRUE(ValidateSharedDecode(bad).ok());
  ++bad.batch.num_sequences;
  EXPECT_THAT(refusal(bad),
              AllOf(HasSubstr("num_sequences is 524281"), HasSubstr("at most 524280")));
}

TEST(SharedDecodeTest, WorkspaceOfAShapeWithoutRowsOrPagesIsRefused) {
  SharedDecodeParams params;
  params.batch = ValidParams();
  params.prefix = params.batch.history;
  params.prefix_pages = params.batch.history_pages;
  const auto refuse = [](SharedDecodeParams bad, const char* words) {
    const absl::Status status = SharedDecodeWorkspaceBytes(bad).status();
    // A build without CUDA has nothing to say of shapes.
    EXPECT_THAT(std::string(status.message()),
                testing::AnyOf(HasSubstr("CRUMB_CUDA"), HasSubstr(words)));
  };
  SharedDecodeParams bad = params;
  bad.batch.num_sequences = 0;
  refuse(bad, "num_sequences is 0");
  bad = params;
  bad.batch.num_query_heads = 1;
  refuse(bad, "num_query_heads is 1");
  bad = params;
  bad.batch.num_kv_heads = 0;
  refuse(bad, "num_kv_heads is 0");
  bad = params;
  bad.prefix.stride = 0;
  refuse(bad, "prefix.stride is 0");
}

TEST(SplitDecodeTest, SaysWhatIsMissingWhereThereIsNoGpu) {
  if (CurrentGpu().ok()) {
    GTEST_SKIP() << "there is a GPU here";
  }
  const absl::Status status = SplitDecode(ValidParams(), nullptr);
  EXPECT_TRUE(absl::IsUnimplemented(status) || absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              testing::AnyOf(HasSubstr("CRUMB_CUDA"), HasSubstr("driver")));
}

}  // namespace
}  // namespace crumb
