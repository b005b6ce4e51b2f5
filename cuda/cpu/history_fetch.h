// SPDX-License-Identifier: Apache-2.0
//
// Asking for INT2 pages before they are read. Pages lie anywhere in memory, so no stream is there
// for the processor to see. They are asked for in two steps. Their addresses are translated some
// dozens at a time: a prefetch whose translation is not at hand holds up the instructions behind
// it, but several wait side by side. Their lines are fetched along the way, key codes and metadata
// while keys are multiplied, value codes while values are: together they would fill the queue of
// misses. Each line is asked for twice, two batches before it is read and one: the processor drops
// what it has no room for. All go to the second cache; the first one is full.
// docs/decisions/0021-fetching-scattered-pages.md and 0022-four-pages-at-a-time.md say what that is
// worth.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/cpu/history_batch.h"
#include "cuda/cpu/split_attention_kernel.h"

namespace crumb::cpu {

inline constexpr size_t kTranslationBatch = 32;
inline constexpr size_t kMemoryPage = 4096;
inline constexpr size_t kCacheLine = 64;

// A template, so that each instruction set has its own copy.
template <typename Simd>
class HistoryFetch {
 public:
  // Where a block's metadata begin, and its bytes.
  static constexpr size_t MetaOffset(size_t key_dim, size_t value_dim) {
    return kPageTokens / 4 * (key_dim + value_dim);
  }
  static constexpr size_t kMetaBytes = size_t{8} * kPageTokens;

  // One line of the pages to come, `at` bytes into their blocks.
  static void Ahead(const HistoryPage<Simd>& page, size_t at) {
    __builtin_prefetch(page.ahead[0] + at, 0, 2);
    __builtin_prefetch(page.ahead[1] + at, 0, 2);
  }

  static void Block(const HistoryArgs& args, const std::byte* block) {
    Lines(block, MetaOffset(args.key_dim, args.value_dim) + kMetaBytes);
  }

  // What scores are made of.
  static void Keys(const HistoryArgs& args, const std::byte* block) {
    Lines(block, kPageTokens / 4 * args.key_dim);
    Lines(block + MetaOffset(args.key_dim, args.value_dim), kMetaBytes / 2);
  }

  // The addresses of kTranslationBatch pages from `first` on.
  static void Translations(const HistoryArgs& args, size_t first) {
    const size_t bytes = MetaOffset(args.key_dim, args.value_dim) + kMetaBytes;
    for (size_t i = first; i < first + kTranslationBatch && i < args.num_pages; ++i) {
      const std::byte* block = args.pages[i];
      const size_t into_page = reinterpret_cast<uintptr_t>(block) % kMemoryPage;
      __builtin_prefetch(block, 0, 2);
      for (size_t at = kMemoryPage - into_page; at < bytes; at += kMemoryPage) {
        __builtin_prefetch(block + at, 0, 2);
      }
    }
    asm volatile("");  // Or GCC 12 finds that this function does nothing, and drops the call.
  }

 private:
  static void Lines(const std::byte* from, size_t bytes) {
    for (size_t i = 0; i < bytes; i += kCacheLine) {
      __builtin_prefetch(from + i, 0, 2);
    }
    asm volatile("");  // As above.
  }
};

}  // namespace crumb::cpu
