// SPDX-License-Identifier: Apache-2.0
//
// The rule in words, against the function, over every small case: the largest usable u such that
// every token in [max(sink, prompt - recent), u) is there in BF16, every token of the sink too, and
// every other token in some encoding; whole pages, and one token at least left to compute.
#include "proto/page/usable_length.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "proto/page/page_format.h"

namespace crumb {
namespace {

struct Question {
  uint32_t prompt_tokens;
  std::vector<PageContent> matched;
  Windows windows;
  bool allow_int2_window;
};

// Whether pages [0, pages) may be used: asks each token by itself.
bool MayUse(const Question& question, uint32_t pages, bool allow_int2_window) {
  if (pages > question.matched.size() || pages * kPageTokens + 1 > question.prompt_tokens) {
    return pages == 0;
  }
  const int64_t window_start =
      int64_t{question.prompt_tokens} - int64_t{question.windows.recent_tokens};
  for (uint32_t token = 0; token < pages * kPageTokens; ++token) {
    const PageContent& content = question.matched[token / kPageTokens];
    const bool in_sink = token < question.windows.sink_tokens;
    const bool in_window = token >= window_start && !allow_int2_window;
    if (!content.has_bf16 && (in_sink || in_window || !content.has_int2)) {
      return false;
    }
  }
  return true;
}

uint32_t Largest(const Question& question, bool allow_int2_window) {
  auto pages = static_cast<uint32_t>(question.matched.size());
  while (!MayUse(question, pages, allow_int2_window)) {
    --pages;
  }
  return pages;
}

void ExpectTheRule(const Question& question) {
  const UsableLength actual = ComputeUsableLength(question.prompt_tokens, question.matched,
                                                  question.windows, question.allow_int2_window);
  const uint32_t usable = Largest(question, question.allow_int2_window);
  ASSERT_EQ(actual.usable_pages, usable)
      << question.prompt_tokens << " tokens, sink " << question.windows.sink_tokens << ", recent "
      << question.windows.recent_tokens;
  ASSERT_EQ(actual.trimmed_pages, Largest(question, true) - usable);
}

std::vector<PageContent> Contents(uint32_t num_pages, uint32_t choice) {
  std::vector<PageContent> contents;
  for (uint32_t page = 0; page < num_pages; ++page, choice /= 4) {
    contents.push_back({.has_int2 = choice % 4 % 2 != 0, .has_bf16 = choice % 4 / 2 != 0});
  }
  return contents;
}

TEST(UsableLengthTest, IsTheRuleForEverySmallCase) {
  std::vector<uint32_t> prompts = {0, 1};
  for (uint32_t page = 1; page <= 6; ++page) {
    prompts.insert(prompts.end(),
                   {page * kPageTokens - 1, page * kPageTokens, page * kPageTokens + 1});
  }
  for (uint32_t num_pages = 0; num_pages <= 4; ++num_pages) {
    for (uint32_t choice = 0; choice < (1U << (2 * num_pages)); ++choice) {
      const std::vector<PageContent> matched = Contents(num_pages, choice);
      for (const uint32_t sink : {0U, 64U, 128U}) {
        for (const uint32_t recent : {0U, 64U, 128U, 256U}) {
          for (const uint32_t prompt : prompts) {
            ExpectTheRule({prompt, matched, {sink, recent}, false});
            ExpectTheRule({prompt, matched, {sink, recent}, true});
            if (HasFatalFailure()) {
              return;
            }
          }
        }
      }
    }
  }
}

// The cases that the design names, with its numbers.

std::vector<PageContent> Published(uint32_t pages, uint32_t tail_pages) {
  std::vector<PageContent> contents(pages, {.has_int2 = true, .has_bf16 = false});
  contents[0] = {.has_int2 = false, .has_bf16 = true};
  for (uint32_t page = pages - tail_pages; page < pages; ++page) {
    contents[page].has_bf16 = true;
  }
  return contents;
}

TEST(UsableLengthTest, ALongSuffixNeedsNoTail) {
  // 10 pages matched, 256 tokens and more to compute: no matched token is in the recent window.
  const UsableLength usable = ComputeUsableLength(640 + 256, Published(10, 0), {}, false);
  EXPECT_EQ(usable.usable_pages, 10U);
  EXPECT_EQ(usable.trimmed_pages, 0U);
}

TEST(UsableLengthTest, AShortSuffixIsServedByTheTail) {
  const UsableLength usable = ComputeUsableLength(640 + 10, Published(10, 4), {}, false);
  EXPECT_EQ(usable.usable_pages, 10U);
}

TEST(UsableLengthTest, AShortSuffixWithoutATailIsCutBackAndSaysSo) {
  // 650 tokens: the recent window starts at 394, in page 6, which is not there in BF16.
  const UsableLength usable = ComputeUsableLength(650, Published(10, 0), {}, false);
  EXPECT_EQ(usable.usable_pages, 6U);
  EXPECT_EQ(usable.trimmed_pages, 4U);
}

TEST(UsableLengthTest, AnEngineMayDoWithoutTheWindow) {
  const UsableLength usable = ComputeUsableLength(650, Published(10, 0), {}, true);
  EXPECT_EQ(usable.usable_pages, 10U);
  EXPECT_EQ(usable.trimmed_pages, 0U);
}

TEST(UsableLengthTest, APromptThatIsAllMatchedLeavesItsLastPageToCompute) {
  const UsableLength usable = ComputeUsableLength(640, Published(10, 4), {}, false);
  EXPECT_EQ(usable.usable_pages, 9U);
}

}  // namespace
}  // namespace crumb
