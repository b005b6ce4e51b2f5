// SPDX-License-Identifier: Apache-2.0
//
// Whether bytes are text: what protobuf asks of every string that it carries.
#pragma once

#include <string_view>

namespace crumb {

// Well-formed UTF-8 (RFC 3629): no overlong forms, no surrogates, nothing above U+10FFFF.
bool IsUtf8(std::string_view text);

}  // namespace crumb
