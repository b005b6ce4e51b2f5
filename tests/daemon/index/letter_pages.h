// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "proto/page/page_format.h"

namespace crumb {

// One page a letter: equal letters, equal pages.
inline std::vector<uint32_t> Pages(std::string_view letters) {
  std::vector<uint32_t> tokens;
  for (const char letter : letters) {
    tokens.insert(tokens.end(), kPageTokens, static_cast<uint32_t>(letter));
  }
  return tokens;
}

}  // namespace crumb
