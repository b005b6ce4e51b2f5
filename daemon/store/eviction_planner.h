// SPDX-License-Identifier: Apache-2.0
//
// Chooses what to evict so that a publish fits, without evicting: if nothing makes it fit, nothing
// is lost. Two kinds of things may go, in one order of last use:
//
//   the last page of a leaf, with all its blocks   (what no longer prefix needs)
//   the BF16 copy of a page that has INT2 rows     (a published prefix's tail that has gone cold)
//
// Tails have a recency of their own, moved on only by lookups that were given them: while a
// conversation grows, its old tails cost seven times an INT2 page each and serve no one.
//
// Memory is taken from and given back to the system by whole chunks, so a freed block helps if it
// is the same namespace's, or if its chunk becomes empty. Candidates are taken coldest first until
// the publish fits; then those that turned out not to help are spared, warmest first.
//
// Costs: things in use are passed over one by one where they are the coldest; and a publish that
// cannot fit has looked at everything that is not in use.
//
// Thread-compatible (the store's mutex); used once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <queue>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"

#include "daemon/index/radix_tree.h"
#include "daemon/policy/lru_queue.h"
#include "daemon/store/block_table.h"

namespace crumb::store_internal {

// What eviction may take. Leaves are leaf nodes of any tree; tails are BF16 blocks with heads
// present beyond the sink. In use or not: the planner looks.
struct EvictionQueues {
  LruQueue<PrefixNode*> leaves;
  LruQueue<BlockSlot> tails;
};

// Either the page `page_idx` of `node`, its last one by then; or just the block `tail`.
struct Victim {
  PrefixNode* node = nullptr;
  uint32_t page_idx = 0;
  BlockSlot tail = 0;
};

// True if no pin, publish or transfer keeps the page: all its blocks may be freed.
bool IsPageIdle(const BlockTable& blocks, const PrefixNode& node, uint32_t page_idx);

class EvictionPlanner {
 public:
  // `need`: blocks that the pool is to have free, or room for.
  EvictionPlanner(const BlockTable& blocks,
                  const EvictionQueues& queues,
                  const BlockPool& pool,
                  const PerEncoding& need);

  // Victims in the order in which they may be evicted; nullopt: evicting everything would not do.
  std::optional<std::vector<Victim>> Plan();

  // Items of the queues that Plan found to have been used later than told, with the true stamps.
  const std::vector<std::pair<PrefixNode*, int64_t>>& stale_leaves() const { return stale_leaves_; }
  const std::vector<std::pair<BlockSlot, int64_t>>& stale_tails() const { return stale_tails_; }

 private:
  struct Candidate {
    int64_t last_use = 0;
    PrefixNode* node = nullptr;
    BlockSlot tail = 0;
    friend bool operator>(const Candidate& a, const Candidate& b) {
      return a.last_use > b.last_use;
    }
  };
  // A node as it would be after the victims so far.
  struct NodeLeft {
    uint32_t pages = 0;
    size_t children = 0;
  };

  bool Fits() const;
  std::optional<Candidate> Next();
  void ConsiderTail(const Candidate& candidate);
  void ConsiderLeaf(const Candidate& candidate);
  void SpareWhatDoesNotHelp();
  bool MaySpare(const Victim& victim);
  NodeLeft& Left(PrefixNode* node);
  // The blocks of a victim that no earlier victim had.
  std::vector<BlockSlot> BlocksOf(const Victim& victim) const;
  void Free(BlockSlot slot);
  void Unfree(BlockSlot slot);
  bool IsOwn(const Chunk& chunk) const;

  const BlockTable& blocks_;
  const EvictionQueues& queues_;
  const BlockPool& pool_;
  const PerEncoding need_;
  LruQueue<PrefixNode*>::Ordered::const_iterator next_leaf_;
  LruQueue<BlockSlot>::Ordered::const_iterator next_tail_;
  // Candidates that the queues do not tell: with their true stamp, or leaves only by then.
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> found_;

  std::array<int64_t, 2> free_blocks_{};  // Of the pool.
  int64_t free_bytes_ = 0;                // Of the arena.
  absl::flat_hash_map<PrefixNode*, NodeLeft> left_;
  absl::flat_hash_map<const Chunk*, uint32_t> freed_of_chunk_;
  absl::flat_hash_set<BlockSlot> freed_;
  std::vector<Victim> victims_;
  std::vector<std::vector<BlockSlot>> victim_blocks_;  // Beside victims_.
  std::vector<std::pair<PrefixNode*, int64_t>> stale_leaves_;
  std::vector<std::pair<BlockSlot, int64_t>> stale_tails_;
};

}  // namespace crumb::store_internal
