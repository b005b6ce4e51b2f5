// SPDX-License-Identifier: Apache-2.0
#include "client/example/dequantize.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"

#include "tests/client/example/expected.h"

namespace crumb::example {
namespace {

TEST(DequantizeTest, AgreesWithGgmlOnEveryFormat) {
  const nlohmann::json cases = ReadExpected("expected_weights.json");
  ASSERT_EQ(cases.size(), 6u);
  for (const auto& expected : cases) {
    const auto name = expected["name"].get<std::string>();
    SCOPED_TRACE(name);
    const absl::StatusOr<GgmlTypeInfo> info = FindGgmlType(expected["number"].get<uint32_t>());
    ASSERT_TRUE(info.ok());
    EXPECT_EQ(info->name, name);
    const std::string bytes = absl::HexStringToBytes(expected["bytes"].get<std::string>());
    const auto values = expected["values"].get<std::vector<float>>();
    ASSERT_EQ(bytes.size() / info->block_bytes * info->block_elements, values.size());

    std::vector<float> out(values.size());
    Dequantize(info->type, std::as_bytes(std::span(bytes)), out);
    for (size_t i = 0; i < out.size(); ++i) {
      // Where we add an offset, ggml may subtract first: one rounding more or less.
      ASSERT_NEAR(out[i], values[i], 1e-6 * std::max(1.0f, std::abs(values[i]))) << "element " << i;
    }
  }
}

TEST(DequantizeTest, CopiesFloats) {
  const std::vector<float> values = {1.5f, -2.25f, 0};
  std::vector<float> out(3);
  Dequantize(GgmlType::kF32, std::as_bytes(std::span(values)), out);
  EXPECT_EQ(out, values);
}

TEST(DequantizeTest, NamesAnUnknownFormatAndTheKnownOnes) {
  const auto info = FindGgmlType(30);
  EXPECT_EQ(info.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(info.status().message(),
              ::testing::AllOf(::testing::HasSubstr("30"), ::testing::HasSubstr("F32, F16, Q4_0")));
}

}  // namespace
}  // namespace crumb::example
