// SPDX-License-Identifier: Apache-2.0
//
// Codes, a byte each, into the words of an INT2 head block and out of them: the page format's index
// arithmetic (proto/page/page_format.h) several codes at a time. In by channel, as demotion makes
// them; out by token, as expansion wants them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crumb::cpu {

// codes [dim, kPageTokens] of 0..3; packed has kPageTokens * dim / 4 bytes.
void PackKeyCodes(const uint8_t* codes, size_t dim, std::byte* packed);
void PackValueCodes(const uint8_t* codes, size_t dim, std::byte* packed);

// The other way: codes [kPageTokens, dim].
void UnpackKeyCodes(const std::byte* packed, size_t dim, uint8_t* codes);
void UnpackValueCodes(const std::byte* packed, size_t dim, uint8_t* codes);

// scales and minima [kPageTokens] fp16 by token; meta has 4 * kPageTokens bytes.
void PackMeta(const uint16_t* scales, const uint16_t* minima, std::byte* meta);

}  // namespace crumb::cpu
