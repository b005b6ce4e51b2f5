// SPDX-License-Identifier: Apache-2.0
#include "proto/page/usable_length.h"

#include <algorithm>

#include "proto/page/page_format.h"

namespace crumb {

UsableLength ComputeUsableLength(uint32_t prompt_tokens,
                                 std::span<const PageContent> matched,
                                 const Windows& windows,
                                 bool allow_int2_window) {
  // One token at least is left: its logits are what the engine wants.
  const uint32_t whole_pages = prompt_tokens == 0 ? 0 : (prompt_tokens - 1) / kPageTokens;
  const uint32_t sink_pages = windows.sink_tokens / kPageTokens;
  const auto matched_pages = std::min<uint32_t>(whole_pages, static_cast<uint32_t>(matched.size()));

  // A page without the rows that its place needs ends the match: nothing after it can be used.
  uint32_t present = 0;
  while (present < matched_pages &&
         (matched[present].has_bf16 || (present >= sink_pages && matched[present].has_int2))) {
    ++present;
  }
  if (allow_int2_window) {
    return {present, 0};
  }
  const uint32_t window_start_tokens =
      prompt_tokens > windows.recent_tokens ? prompt_tokens - windows.recent_tokens : 0;
  uint32_t usable = std::min(present, window_start_tokens / kPageTokens);
  while (usable < present && matched[usable].has_bf16) {
    ++usable;
  }
  return {usable, present - usable};
}

}  // namespace crumb
