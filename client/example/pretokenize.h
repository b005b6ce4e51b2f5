// SPDX-License-Identifier: Apache-2.0
//
// Splits text into the pieces within which byte-level BPE merges, as the regular expression of
// GPT-2 does, written out by hand:
//
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//
// SmolLM first takes every number character (\p{N}) out as a piece of its own.
#pragma once

#include <functional>
#include <string_view>

namespace crumb::example {

enum class Pretokenizer {
  kGpt2,
  kSmolLm,
};

// Calls `piece` with the pieces of `text` in order; together they are `text`. A byte that is not
// UTF-8 counts as one character that is neither letter, number nor space. Thread-safe.
void Pretokenize(Pretokenizer pretokenizer,
                 std::string_view text,
                 const std::function<void(std::string_view)>& piece);

}  // namespace crumb::example
