// SPDX-License-Identifier: Apache-2.0
//
// What may be evicted, coldest first. Keeps the stamp of each item's last use as it was told last;
// later uses need not be told. So a lookup does no work here at all, and whoever evicts asks the
// owner for the stamp of the few items that it reaches. A stamp told here is never later than the
// true one: whoever lets an item become evictable again offers it anew.
//
// Pure; Thread-compatible. Item is a small value that hashes and compares.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"

namespace crumb {

template <typename Item>
class LruQueue {
 public:
  // (last use, item), ascending.
  using Ordered = absl::btree_set<std::pair<int64_t, Item>>;

  // Puts the item in, or moves it to another stamp. O(log n).
  void Offer(Item item, int64_t last_use) {
    const auto [place, is_new] = last_use_.try_emplace(item, last_use);
    if (!is_new) {
      if (place->second == last_use) {
        return;
      }
      ordered_.erase({place->second, item});
      place->second = last_use;
    }
    ordered_.emplace(last_use, item);
  }

  // Takes the item out; no-op if it is not in.
  void Withdraw(Item item) {
    const auto place = last_use_.find(item);
    if (place != last_use_.end()) {
      ordered_.erase({place->second, item});
      last_use_.erase(place);
    }
  }

  bool Contains(Item item) const { return last_use_.contains(item); }
  size_t size() const { return ordered_.size(); }
  // Coldest first by the stamps told. Invalidated by Offer and Withdraw.
  const Ordered& ordered() const { return ordered_; }

 private:
  Ordered ordered_;
  absl::flat_hash_map<Item, int64_t> last_use_;
};

}  // namespace crumb
