// SPDX-License-Identifier: Apache-2.0
#include "daemon/store/eviction_planner.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "proto/base/check.h"

namespace crumb::store_internal {

bool IsPageIdle(const BlockTable& blocks, const PrefixNode& node, uint32_t page_idx) {
  if (node.IsHeld(page_idx)) {
    return false;
  }
  const PageSlots& slots = node.pages()[page_idx - node.first_page()];
  for (const BlockSlot first : {slots.int2, slots.bf16}) {
    for (BlockSlot slot = first; slot != 0; slot = blocks[slot].next) {
      if (!blocks[slot].IsIdle()) {
        return false;
      }
    }
  }
  return true;
}

EvictionPlanner::EvictionPlanner(const BlockTable& blocks,
                                 const EvictionQueues& queues,
                                 const BlockPool& pool,
                                 const PerEncoding& need)
    : blocks_(blocks),
      queues_(queues),
      pool_(pool),
      need_(need),
      next_leaf_(queues.leaves.ordered().begin()),
      next_tail_(queues.tails.ordered().begin()),
      free_blocks_{pool.chunks[0].num_free, pool.chunks[1].num_free},
      free_bytes_(static_cast<int64_t>(blocks.arena().free_bytes())) {}

bool EvictionPlanner::Fits() const {
  PerEncoding missing{};
  for (size_t i = 0; i < missing.size(); ++i) {
    missing[i] = static_cast<uint32_t>(std::max<int64_t>(0, int64_t{need_[i]} - free_blocks_[i]));
  }
  return static_cast<int64_t>(blocks_.MinimumBytes(pool_.geometry, missing)) <= free_bytes_;
}

std::optional<std::vector<Victim>> EvictionPlanner::Plan() {
  if (blocks_.MinimumBytes(pool_.geometry, need_) > blocks_.arena().capacity_bytes()) {
    return std::nullopt;  // Not even alone.
  }
  while (!Fits()) {
    const std::optional<Candidate> candidate = Next();
    if (!candidate.has_value()) {
      return std::nullopt;
    }
    candidate->node != nullptr ? ConsiderLeaf(*candidate) : ConsiderTail(*candidate);
  }
  SpareWhatDoesNotHelp();
  return std::move(victims_);
}

std::optional<EvictionPlanner::Candidate> EvictionPlanner::Next() {
  std::optional<Candidate> best;
  if (next_leaf_ != queues_.leaves.ordered().end()) {
    best = {next_leaf_->first, next_leaf_->second, 0};
  }
  if (next_tail_ != queues_.tails.ordered().end() &&
      (!best.has_value() || next_tail_->first < best->last_use)) {
    best = {next_tail_->first, nullptr, next_tail_->second};
  }
  if (!found_.empty() && (!best.has_value() || found_.top().last_use <= best->last_use)) {
    best = found_.top();
    found_.pop();
  } else if (best.has_value()) {
    best->node != nullptr ? static_cast<void>(++next_leaf_) : static_cast<void>(++next_tail_);
  }
  return best;
}

void EvictionPlanner::ConsiderTail(const Candidate& candidate) {
  const StoredBlock& block = blocks_[candidate.tail];
  if (freed_.contains(candidate.tail) || !block.IsIdle()) {
    return;
  }
  if (block.last_use > candidate.last_use) {
    stale_tails_.emplace_back(candidate.tail, block.last_use);
    found_.push({block.last_use, nullptr, candidate.tail});
    return;
  }
  victims_.push_back({block.node, block.page.value(), candidate.tail});
  victim_blocks_.push_back({candidate.tail});
  Free(candidate.tail);
}

void EvictionPlanner::ConsiderLeaf(const Candidate& candidate) {
  PrefixNode* const node = candidate.node;
  NodeLeft& left = Left(node);
  if (left.children > 0 || left.pages == 0) {
    return;
  }
  const uint32_t page_idx = node->first_page() + left.pages - 1;
  if (!IsPageIdle(blocks_, *node, page_idx)) {
    return;
  }
  const int64_t last_use = node->LastUse(page_idx);
  if (last_use > candidate.last_use) {
    stale_leaves_.emplace_back(node, last_use);
    found_.push({last_use, node, 0});
    return;
  }
  const Victim victim{node, page_idx, 0};
  victim_blocks_.push_back(BlocksOf(victim));
  victims_.push_back(victim);
  for (const BlockSlot slot : victim_blocks_.back()) {
    Free(slot);
  }
  if (--left.pages > 0) {
    found_.push({node->LastUse(page_idx - 1), node, 0});
  } else if (PrefixNode* const parent = node->parent();
             --Left(parent).children == 0 && !parent->is_root()) {
    found_.push({parent->LastUse(parent->end_page() - 1), parent, 0});
  }
}

// A victim helps if the publish would not fit without it, or if it must go for one that helps: its
// descendants go before a page does. Backwards, each is asked after all that it might go for.
void EvictionPlanner::SpareWhatDoesNotHelp() {
  std::vector<Victim> kept;
  for (size_t i = victims_.size(); i-- > 0;) {
    const Victim victim = victims_[i];
    if (!MaySpare(victim)) {
      kept.push_back(victim);
      continue;
    }
    for (const BlockSlot slot : victim_blocks_[i]) {
      Unfree(slot);
    }
    if (!Fits()) {
      for (const BlockSlot slot : victim_blocks_[i]) {
        Free(slot);
      }
      kept.push_back(victim);
      continue;
    }
    if (victim.tail == 0 && ++Left(victim.node).pages == 1) {
      ++Left(victim.node->parent()).children;
    }
  }
  victims_.assign(kept.rbegin(), kept.rend());
}

// A page may stay only under pages that stay, a tail copy only beside its page.
bool EvictionPlanner::MaySpare(const Victim& victim) {
  PrefixNode* const node = victim.node;
  const uint32_t pages_left = Left(node).pages;
  const uint32_t page_of_node = victim.page_idx - node->first_page();
  if (victim.tail != 0) {
    return page_of_node < pages_left;
  }
  PrefixNode* const parent = node->parent();
  return page_of_node == pages_left &&
         (page_of_node > 0 || Left(parent).pages == parent->num_pages());
}

EvictionPlanner::NodeLeft& EvictionPlanner::Left(PrefixNode* node) {
  return left_.try_emplace(node, NodeLeft{node->num_pages(), node->num_children()}).first->second;
}

std::vector<BlockSlot> EvictionPlanner::BlocksOf(const Victim& victim) const {
  std::vector<BlockSlot> result;
  const PageSlots& slots = victim.node->pages()[victim.page_idx - victim.node->first_page()];
  for (const BlockSlot first : {slots.int2, slots.bf16}) {
    for (BlockSlot slot = first; slot != 0; slot = blocks_[slot].next) {
      if (!freed_.contains(slot)) {
        result.push_back(slot);
      }
    }
  }
  return result;
}

bool EvictionPlanner::IsOwn(const Chunk& chunk) const {
  return chunk.spec().namespace_id == pool_.namespace_id;
}

void EvictionPlanner::Free(BlockSlot slot) {
  CRUMB_CHECK(freed_.insert(slot).second, "block freed twice");
  const Chunk& chunk = *blocks_[slot].chunk;
  const uint32_t freed = ++freed_of_chunk_[&chunk];
  int64_t& own = free_blocks_[EncodingIndex(chunk.spec().encoding)];
  if (IsOwn(chunk)) {
    ++own;
  }
  if (freed == chunk.num_used()) {  // The chunk would be closed: bytes instead of free blocks.
    free_bytes_ += static_cast<int64_t>(chunk.bytes());
    own -= IsOwn(chunk) ? chunk.num_blocks() : 0;
  }
}

void EvictionPlanner::Unfree(BlockSlot slot) {
  CRUMB_CHECK(freed_.erase(slot) == 1, "block that was not freed");
  const Chunk& chunk = *blocks_[slot].chunk;
  const uint32_t freed = freed_of_chunk_[&chunk]--;
  int64_t& own = free_blocks_[EncodingIndex(chunk.spec().encoding)];
  if (freed == chunk.num_used()) {
    free_bytes_ -= static_cast<int64_t>(chunk.bytes());
    own += IsOwn(chunk) ? chunk.num_blocks() : 0;
  }
  if (IsOwn(chunk)) {
    --own;
  }
}

}  // namespace crumb::store_internal
