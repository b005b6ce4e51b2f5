// SPDX-License-Identifier: Apache-2.0
//
// The page store as one would write it with no care for speed: a map from prefixes to what is there
// of their last page. Knows nothing of trees, chunks or recency; what the store evicts it is told.
#pragma once

#include <algorithm>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "proto/page/page_format.h"

namespace crumb {

// A block of one encoding: heads that are readable, and heads that a publish writes.
struct TwinBlock {
  uint64_t present = 0;
  uint64_t claimed = 0;
};

struct TwinPage {
  std::list<TwinBlock> blocks[2];  // INT2, BF16; oldest first.
  int pins = 0;                    // Leases, publishes and reads that end here.
  // BF16 copies beyond the sink may have been evicted: then which are there is not known here.
  bool copies_unknown = false;

  bool IsResident() const {
    return std::any_of(std::begin(blocks), std::end(blocks), [](const auto& list) {
      return std::any_of(list.begin(), list.end(), [](const auto& b) { return b.present != 0; });
    });
  }
  bool IsWritten() const {
    return std::any_of(std::begin(blocks), std::end(blocks), [](const auto& list) {
      return std::any_of(list.begin(), list.end(), [](const auto& b) { return b.claimed != 0; });
    });
  }
  void ForgetCopies() {
    copies_unknown = copies_unknown || !blocks[1].empty();
    blocks[1].remove_if([](const TwinBlock& block) { return block.claimed == 0; });
    for (TwinBlock& block : blocks[1]) {
      block.present = 0;
    }
  }
  bool Has(int encoding, uint64_t heads) const {
    return std::any_of(blocks[encoding].begin(), blocks[encoding].end(),
                       [&](const auto& b) { return (b.present & heads) == heads; });
  }
};

// One page of a publish in one encoding.
struct TwinItem {
  std::string prefix;
  int encoding = 0;  // 0: INT2, 1: BF16.
  TwinBlock* block = nullptr;
};

// What a store may do wrong, and so may a twin: that the model notices when the two differ is
// tested by twins that do.
enum class TwinFault {
  kNone,
  kFindsAPageTooFew,
  kFindsAPageTooMany,
  kNeedsNoRecentWindow,
  kShowsBeforeCommit,
  kCommitsOneHead,
  kForgetsPins,
  kKeepsAnEvictedPage,
  kKeepsAbortedClaims,
};

class StoreTwin {
 public:
  explicit StoreTwin(TwinFault fault = TwinFault::kNone) : fault_(fault) {}

  static constexpr uint32_t kSink = 1;
  static constexpr uint32_t kRecent = 2;
  static constexpr size_t kMaxBlocks = 4;

  // Keys are "namespace|letters", a letter a page.
  static uint32_t NumPages(const std::string& prefix) {
    return static_cast<uint32_t>(prefix.size() - prefix.find('|') - 1);
  }
  static std::string First(const std::string& prefix, uint32_t pages) {
    return prefix.substr(0, prefix.find('|') + 1 + pages);
  }

  std::map<std::string, TwinPage> pages;

  // `unknown`, here and below: what to take for copies that are not known.
  bool IsVisible(const std::string& prefix, uint64_t heads, bool unknown) const {
    const auto place = pages.find(prefix);
    if (place == pages.end()) {
      return false;
    }
    const TwinPage& page = place->second;
    return page.Has(0, heads) || (page.copies_unknown ? unknown : page.Has(1, heads));
  }
  // Pages from the first on that a session of `heads` sees.
  uint32_t Matched(const std::string& prefix, uint64_t heads, bool unknown) const {
    uint32_t n = 0;
    while (n < NumPages(prefix) && IsVisible(First(prefix, n + 1), heads, unknown)) {
      ++n;
    }
    if (fault_ == TwinFault::kFindsAPageTooFew && n > 0) {
      --n;
    } else if (fault_ == TwinFault::kFindsAPageTooMany && n < NumPages(prefix)) {
      ++n;
    }
    return n;
  }

  // The largest length that keeps the recent window in BF16, by trying all of them.
  uint32_t Usable(const std::string& prefix,
                  uint32_t num_tokens,
                  uint64_t heads,
                  bool allow_int2_window,
                  bool unknown) const {
    for (uint32_t u = std::min(Matched(prefix, heads, unknown), (num_tokens - 1) / kPageTokens);;
         --u) {
      bool good = true;
      for (uint32_t p = 0; p < u; ++p) {
        const auto place = pages.find(First(prefix, p + 1));
        if (place == pages.end()) {
          break;  // Only one that finds too many comes here.
        }
        const TwinPage& page = place->second;
        const bool bf16 = page.copies_unknown ? unknown : page.Has(1, heads);
        const bool in_window = (p + 1) * kPageTokens + kRecent * kPageTokens > num_tokens;
        const bool needs_bf16 = p < kSink || (in_window && !allow_int2_window &&
                                              fault_ != TwinFault::kNeedsNoRecentWindow);
        good = good && (needs_bf16 ? bf16 : bf16 || page.Has(0, heads));
      }
      if (good || u == 0) {
        return u;
      }
    }
  }

  // At or above a pin, or being written.
  bool IsHeld(const std::string& prefix) const {
    for (auto it = pages.lower_bound(prefix);
         it != pages.end() && it->first.compare(0, prefix.size(), prefix) == 0; ++it) {
      const bool is_pinned = it->second.pins > 0 && fault_ != TwinFault::kForgetsPins;
      if (is_pinned || it->second.IsWritten()) {
        return true;
      }
    }
    return false;
  }

  // The (page, encoding) that a publish wants, ascending.
  static std::vector<TwinItem> Wanted(const std::string& prefix) {
    std::vector<TwinItem> items;
    const uint32_t n = NumPages(prefix);
    for (uint32_t p = 0; p < n; ++p) {
      if (p >= kSink) {
        items.push_back({First(prefix, p + 1), 0, nullptr});
      }
      if (p < kSink || p + kRecent >= n) {
        items.push_back({First(prefix, p + 1), 1, nullptr});
      }
    }
    return items;
  }

  // Claims heads of the oldest block where they are free, or of a new one. False: too many blocks.
  bool Claim(TwinItem* item, uint64_t heads) {
    TwinPage& page = pages[item->prefix];
    std::list<TwinBlock>& list = page.blocks[item->encoding];
    const bool known = item->encoding == 0 || !page.copies_unknown;
    for (TwinBlock& block : list) {
      if (known && ((block.present | block.claimed) & heads) == 0) {
        block.claimed |= heads;
        item->block = &block;
        return true;
      }
    }
    if (known && list.size() >= kMaxBlocks) {
      return false;
    }
    list.push_back(
        {.present = fault_ == TwinFault::kShowsBeforeCommit ? heads : 0, .claimed = heads});
    item->block = &list.back();
    return true;
  }
  // True: the heads are visible by this. False: they were already.
  bool Commit(const TwinItem& item, uint64_t heads) {
    if (pages.at(item.prefix).Has(item.encoding, heads)) {
      Unclaim(item, heads);
      return false;
    }
    item.block->claimed &= ~heads;
    item.block->present |= fault_ == TwinFault::kCommitsOneHead ? heads & -heads : heads;
    return true;
  }
  void Unclaim(const TwinItem& item, uint64_t heads) {
    if (fault_ == TwinFault::kKeepsAbortedClaims) {
      return;
    }
    item.block->claimed &= ~heads;
    if (item.block->claimed == 0 && item.block->present == 0) {
      pages.at(item.prefix).blocks[item.encoding].remove_if([&](const TwinBlock& block) {
        return &block == item.block;
      });
    }
  }
  void Evicted(const std::set<std::string>& prefixes) {
    for (const std::string& prefix : prefixes) {
      if (fault_ != TwinFault::kKeepsAnEvictedPage || prefix != *prefixes.begin()) {
        pages.erase(prefix);
      }
    }
  }
  // Pages that nothing is left of.
  void Trim() {
    std::erase_if(pages, [&](const auto& entry) {
      return entry.second.blocks[0].empty() && entry.second.blocks[1].empty() &&
             !IsHeld(entry.first);
    });
  }

 private:
  const TwinFault fault_;
};

}  // namespace crumb
