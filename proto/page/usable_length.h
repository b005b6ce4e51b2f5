// SPDX-License-Identifier: Apache-2.0
//
// How much of a matched prefix an engine may use without losing quality. Reading two-bit rows where
// a sequence's recent window should be BF16 costs a great deal of quality and raises no error, so
// every path asks this one function.
#pragma once

#include <cstdint>
#include <span>

namespace crumb {

struct Windows {
  uint32_t sink_tokens = 64;     // A multiple of kPageTokens; may be 0.
  uint32_t recent_tokens = 256;  // A multiple of kPageTokens; may be 0.
  friend constexpr bool operator==(const Windows&, const Windows&) = default;
};

// What the store holds of one page.
struct PageContent {
  bool has_int2 = false;
  bool has_bf16 = false;
};

struct UsableLength {
  uint32_t usable_pages = 0;   // Use pages [0, usable_pages).
  uint32_t trimmed_pages = 0;  // Matched, but given up because their tokens would be in the recent
                               // window of the prompt and are not there in BF16.
};

// The largest usable u (in pages) for a prompt of `prompt_tokens` tokens whose longest match is
// `matched`, page by page from position 0: at most all whole pages that leave one token to compute,
// and such that every page that overlaps [max(sink, prompt - recent), u) has BF16 rows, every page
// below the sink has BF16 rows, and every other page has some encoding. `allow_int2_window` is the
// engine's explicit wish to do without the recent window's BF16 rows.
UsableLength ComputeUsableLength(uint32_t prompt_tokens,
                                 std::span<const PageContent> matched,
                                 const Windows& windows,
                                 bool allow_int2_window);

}  // namespace crumb
