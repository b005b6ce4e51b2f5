// SPDX-License-Identifier: Apache-2.0
//
// Codes, a byte each and by channel, into the words of an INT2 head block: the page format's index
// arithmetic (proto/page/page_format.h) eight codes at a time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crumb::cpu {

// codes [dim, kPageTokens] of 0..3; packed has kPageTokens * dim / 4 bytes.
void PackKeyCodes(const uint8_t* codes, size_t dim, std::byte* packed);
void PackValueCodes(const uint8_t* codes, size_t dim, std::byte* packed);

// scales and minima [kPageTokens] fp16 by token; meta has 4 * kPageTokens bytes.
void PackMeta(const uint16_t* scales, const uint16_t* minima, std::byte* meta);

}  // namespace crumb::cpu
