// SPDX-License-Identifier: Apache-2.0
#include "proto/base/utf8.h"

#include <cstdint>
#include <string>

#include "gtest/gtest.h"

namespace crumb {
namespace {

// As RFC 3629 has it, without a check.
std::string Encoded(uint32_t point, size_t length) {
  if (length == 1) {
    return std::string(1, static_cast<char>(point));
  }
  std::string text;
  for (size_t i = length - 1; i > 0; --i) {
    text.insert(text.begin(), static_cast<char>(0x80 | (point & 0x3f)));
    point >>= 6;
  }
  const uint32_t lead = (0xf00u >> length) & 0xff;
  text.insert(text.begin(), static_cast<char>(lead | point));
  return text;
}

size_t LengthOf(uint32_t point) {
  return point < 0x80 ? 1 : point < 0x800 ? 2 : point < 0x10000 ? 3 : 4;
}

TEST(Utf8Test, EveryCharacterInItsShortestFormAndNoOther) {
  for (uint32_t point = 0; point < 0x120000; ++point) {
    const bool is_character = point <= 0x10ffff && (point < 0xd800 || point > 0xdfff);
    const std::string shortest = Encoded(point, LengthOf(point));
    ASSERT_EQ(IsUtf8(shortest), is_character) << std::hex << point;
    ASSERT_EQ(IsUtf8("a" + shortest + "z"), is_character) << std::hex << point;
    for (size_t length = LengthOf(point) + 1; length <= 4; ++length) {
      ASSERT_FALSE(IsUtf8(Encoded(point, length))) << std::hex << point << " in " << length;
    }
    for (size_t cut = 1; cut < shortest.size(); ++cut) {
      ASSERT_FALSE(IsUtf8(shortest.substr(0, cut))) << std::hex << point;
    }
  }
}

TEST(Utf8Test, NothingIsTextAndStrayBytesAreNot) {
  EXPECT_TRUE(IsUtf8(""));
  for (const int byte : {0x80, 0xbf, 0xc0, 0xc1, 0xf5, 0xff}) {
    EXPECT_FALSE(IsUtf8(std::string(1, static_cast<char>(byte)))) << byte;
  }
}

}  // namespace
}  // namespace crumb
