// SPDX-License-Identifier: Apache-2.0
#include "proto/base/utf8.h"

#include <cstddef>
#include <cstdint>

namespace crumb {
namespace {

// Of a character that begins with `lead`; 0: none does.
size_t LengthOf(uint8_t lead) {
  if (lead < 0x80) {
    return 1;
  }
  if (lead >= 0xc2 && lead <= 0xdf) {  // 0xc0 and 0xc1 would be overlong.
    return 2;
  }
  if (lead >= 0xe0 && lead <= 0xef) {
    return 3;
  }
  return lead >= 0xf0 && lead <= 0xf4 ? 4 : 0;
}

// The second byte's own bounds keep overlong forms, surrogates and what is above U+10FFFF out.
bool IsSecond(uint8_t lead, uint8_t second) {
  const uint8_t first = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const uint8_t last = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  return second >= first && second <= last;
}

}  // namespace

bool IsUtf8(std::string_view text) {
  const auto byte = [&](size_t at) { return static_cast<uint8_t>(text[at]); };
  for (size_t at = 0; at < text.size();) {
    const size_t length = LengthOf(byte(at));
    if (length == 0 || length > text.size() - at ||
        (length > 1 && !IsSecond(byte(at), byte(at + 1)))) {
      return false;
    }
    for (size_t i = 2; i < length; ++i) {
      if ((byte(at + i) & 0xc0) != 0x80) {
        return false;
      }
    }
    at += length;
  }
  return true;
}

}  // namespace crumb
