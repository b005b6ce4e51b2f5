// SPDX-License-Identifier: Apache-2.0
//
// What StoreCore keeps: namespaces, sessions, leases, publishes. Plain records; the rules are in
// store_core.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/time/time.h"

#include "daemon/index/radix_tree.h"
#include "daemon/store/block_table.h"
#include "daemon/store/page_store.h"
#include "daemon/store/store_types.h"
#include "proto/base/ids.h"

namespace crumb::store_internal {

// An isolated set of prefixes. Exists while it has pages or blocks.
struct Namespace {
  NamespaceId id;
  std::string tenant;
  PageProfile profile;
  std::string context_key;
  RadixTree tree;
  BlockPool pool;
  uint64_t pages = 0;         // With some head present, in any encoding.
  uint64_t pages_in[2] = {};  // [EncodingIndex]
  uint64_t used_bytes = 0;    // Of all its blocks.

  uint32_t sink_pages() const { return profile.windows.sink_tokens / kPageTokens; }
  uint32_t recent_pages() const { return profile.windows.recent_tokens / kPageTokens; }
};

struct Session {
  SessionId id;
  SessionSpec spec;  // heads written out.
  absl::Time since;
  absl::flat_hash_set<LeaseId> leases;  // Those in force.
  absl::flat_hash_set<PublishId> publishes;

  uint64_t heads() const { return spec.heads.Mask(); }
};

// In force until `end`; after that in quarantine, and then without an owner, until `end` again.
struct Lease {
  LeaseId id;
  SessionId session;
  Namespace* ns = nullptr;
  HeadRange heads;
  PrefixPin* pin = nullptr;   // On its last page.
  uint32_t window_first = 0;  // First page whose BF16 copy was given, of those beyond the sink.
  absl::InlinedVector<BlockSlot, 4> window;  // From there on, each held.
  bool in_quarantine = false;
  absl::Time end;

  uint32_t num_pages() const { return pin->last_page + 1; }
};

// A block of a publish's plan.
struct PublishItem {
  PageKey key;
  BlockSlot slot = 0;                                  // 0: not allocated yet.
  bool writing = false;                                // A WriteGuard is alive.
  std::optional<WrittenBlock> written = std::nullopt;  // Then not `writing`.
};

struct Publish {
  PublishId id;
  SessionId session;
  Namespace* ns = nullptr;
  HeadRange heads;
  PrefixPin* pin = nullptr;            // On its last page.
  std::vector<PublishItem> items;      // Ascending by key.
  std::vector<BlockSlot> held_copies;  // BF16 copies of the tail that were there, each held.

  uint32_t num_pages() const { return pin->last_page + 1; }
};

// A prefix whose pages are to be copied into the tier beside.
struct Promotion {
  Namespace* ns = nullptr;
  PrefixPin* pin = nullptr;  // On its last page.
  uint32_t next_page = 0;    // Those before it are copied, or on their way.
  bool waited = false;       // Once, for a segment to be ready.
};

// A copy in the order in which copies go: of equally recent ones, the later page first.
struct CopyItem {
  uint32_t pages_before_last = 0;
  BlockSlot slot = 0;

  static CopyItem Of(PageIdx page, BlockSlot slot) { return {~page.value(), slot}; }
  // NOLINTNEXTLINE(modernize-use-nullptr): clang-tidy 14 misreads a defaulted <=>.
  friend constexpr auto operator<=>(const CopyItem&, const CopyItem&) = default;
  template <typename H>
  friend H AbslHashValue(H state, const CopyItem& item) {
    return H::combine(std::move(state), item.slot);
  }
};

// What a CopyBatch holds.
struct CopyHold {
  struct Item {
    Namespace* ns = nullptr;
    BlockSlot slot = 0;  // Held.
    uint64_t heads = 0;  // One run.
    bool arrived = false;
  };
  PageStore* store = nullptr;
  std::vector<Item> items;
  std::vector<PageCopy> copies;  // Beside items.
  size_t bytes = 0;
};

// What a ReadGuard holds.
struct ReadHold {
  PageStore* store = nullptr;
  Namespace* ns = nullptr;
  PrefixPin* pin = nullptr;
  std::vector<BlockSlot> slots;  // Held.
  std::vector<PinnedPage> pages;
};

// "page 7 in BF16".
std::string Describe(const PageKey& key);

// What a WriteGuard holds.
struct WriteHold {
  PageStore* store = nullptr;
  PublishId publish;
  Namespace* ns = nullptr;
  uint64_t heads = 0;
  std::vector<BlockSlot> slots;  // Held, beside blocks.
  std::vector<WritableBlock> blocks;
};

}  // namespace crumb::store_internal
