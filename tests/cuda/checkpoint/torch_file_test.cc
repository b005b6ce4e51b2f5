// SPDX-License-Identifier: Apache-2.0
#include "cuda/checkpoint/torch_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <string>

namespace crumb::checkpoint {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<std::byte> Bytes(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

std::vector<std::byte> Floats(const std::vector<float>& floats) {
  const auto bytes = std::as_bytes(std::span(floats));
  return {bytes.begin(), bytes.end()};
}

// A file whose pickle is the name of its storage of six floats, 0 to 5.
class TorchFileTest : public testing::Test {
 protected:
  void SetUp() override {
    using namespace std::string_literals;  // NOLINT: Strings with zero bytes.
    auto file = TorchFile::FromEntries({{"a/data.pkl", Bytes("\x80\x02X\x01\0\0\0s."s)},
                                        {"a/version", Bytes("3\n")},
                                        {"a/data/s", Floats({0, 1, 2, 3, 4, 5})}});
    ASSERT_TRUE(file.ok()) << file.status();
    file_.emplace(*std::move(file));
  }

  absl::StatusOr<std::vector<float>> View(std::vector<uint64_t> shape,
                                          std::vector<uint64_t> strides,
                                          uint64_t offset,
                                          uint64_t elements = 6) const {
    return file_->Floats({.storage = {.key = file_->tree().root, .num_elements = elements},
                          .offset = offset,
                          .shape = std::move(shape),
                          .strides = std::move(strides)},
                         "the tensor");
  }
  std::string ErrorOf(const absl::StatusOr<std::vector<float>>& floats) const {
    return floats.ok() ? "accepted" : std::string(floats.status().message());
  }

  std::optional<TorchFile> file_;
};

TEST_F(TorchFileTest, ViewsAreReadRowMajor) {
  EXPECT_THAT(*View({2, 3}, {3, 1}, 0), ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(*View({3, 2}, {1, 3}, 0), ElementsAre(0, 3, 1, 4, 2, 5));
  EXPECT_THAT(*View({2, 2}, {2, 1}, 2), ElementsAre(2, 3, 4, 5));
  EXPECT_THAT(*View({}, {}, 4), ElementsAre(4));
  EXPECT_THAT(*View({1, 1, 2}, {99, 1000, 5}, 0), ElementsAre(0, 5));
  EXPECT_THAT(*View({2, 3}, {0, 1}, 1), ElementsAre(1, 2, 3, 1, 2, 3));
}

TEST_F(TorchFileTest, ViewsStayWithinTheirStorage) {
  constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();
  for (const auto& view :
       {View({2, 3}, {3, 1}, 1), View({7}, {1}, 0), View({2}, {6}, 0), View({1}, {1}, 6),
        View({}, {}, kMax), View({2, 2}, {kMax, kMax}, 0), View({kMax, kMax}, {0, 0}, 0),
        View({7}, {0}, 0), View({2}, {kMax}, 1), View({2}, {1}, kMax), View({0}, {1}, 0)}) {
    EXPECT_THAT(ErrorOf(view), HasSubstr("leaves its storage of 6 floats"));
  }
}

TEST_F(TorchFileTest, AStorageHasTheFloatsThatThePickleSays) {
  EXPECT_THAT(ErrorOf(View({5}, {1}, 0, 5)), HasSubstr("has 24 bytes; the pickle says 5 floats"));
  EXPECT_THAT(ErrorOf(View({6}, {1}, 0, 1ULL << 62)), HasSubstr("truncated"));
}

}  // namespace
}  // namespace crumb::checkpoint
