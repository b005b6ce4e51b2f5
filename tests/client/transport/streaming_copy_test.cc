// SPDX-License-Identifier: Apache-2.0
#include "client/transport/streaming_copy.h"

#include <algorithm>
#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "proto/base/crc32c.h"

namespace crumb {
namespace {

TEST(StreamingCopyTest, CopiesEveryLengthAtEveryAlignmentAndNothingBeside) {
  std::mt19937 random(1);
  std::vector<std::byte> source(40'000);
  std::generate(source.begin(), source.end(), [&] { return static_cast<std::byte>(random()); });
  for (const size_t length : {0u, 1u, 15u, 16u, 63u, 64u, 65u, 4096u, 12'288u, 12'289u, 39'000u}) {
    for (const size_t from : {0u, 1u, 16u}) {
      for (const size_t to : {0u, 1u, 16u}) {
        const auto piece = std::span<const std::byte>(source).subspan(from, length);
        std::vector<std::byte> expected(source.size() + 64, std::byte{0xee});
        std::copy(piece.begin(), piece.end(), expected.begin() + static_cast<ptrdiff_t>(to));
        std::vector<std::byte> found(expected.size(), std::byte{0xee});
        StreamingCopy(piece, std::span(found).subspan(to, length));
        EXPECT_EQ(found, expected) << length << " " << from << " " << to;
        std::fill(found.begin(), found.end(), std::byte{0xee});
        EXPECT_EQ(StreamingCopyWithCrc32c(piece, std::span(found).subspan(to, length), 77),
                  Crc32c(piece, 77));
        EXPECT_EQ(found, expected) << length << " " << from << " " << to;
      }
    }
  }
}

}  // namespace
}  // namespace crumb
