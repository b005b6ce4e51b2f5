// SPDX-License-Identifier: Apache-2.0
//
// StoreCore: eviction, for a publish's sake or an operator's.
#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"

#include "daemon/store/store_core.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"

namespace crumb::store_internal {

bool StoreCore::MakeRoom(Namespace* ns, const PerEncoding& need) {
  EvictionPlanner planner(blocks_, queues_, ns->pool, need);
  const std::optional<std::vector<Victim>> victims = planner.Plan();
  for (const auto& [node, stamp] : planner.stale_leaves()) {
    if (queues_.leaves.Contains(node)) {
      queues_.leaves.Offer(node, stamp);
    }
  }
  for (const auto& [slot, stamp] : planner.stale_tails()) {
    queues_.tails.Offer(slot, stamp);
  }
  if (!victims.has_value()) {
    return false;
  }
  absl::flat_hash_set<Namespace*> touched;
  for (const Victim& victim : *victims) {
    if (victim.tail != 0) {
      EvictTailCopy(victim.tail);
      continue;
    }
    CRUMB_CHECK(victim.page_idx + 1 == victim.node->end_page(), "eviction out of order");
    Namespace* const owner = NamespaceOf(*victim.node);
    EvictPage(owner, victim.node);
    touched.insert(owner);
  }
  touched.erase(ns);  // The publish is in it.
  for (Namespace* const owner : touched) {
    DropNamespaceIfEmpty(owner);
  }
  return true;
}

absl::Status StoreCore::NoRoom(const Geometry& geometry, const PerEncoding& need) const {
  uint64_t held_pages = 0;
  for (const auto& [id, other] : namespaces_) {
    held_pages += other->tree.held_pages();
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      "no room: the publish needs ", need[0], " blocks of ",
      geometry.PageBytes(PageEncoding::kInt2), " bytes (INT2) and ", need[1], " of ",
      geometry.PageBytes(PageEncoding::kBf16), " (BF16); [store] capacity is ",
      blocks_.arena().capacity_bytes(), ", ", blocks_.arena().chunk_bytes(), " are in chunks, ",
      blocks_.used_bytes(), " in blocks, ", blocks_.unfinished_bytes(), " of them of ",
      publishes_.size(), " unfinished publishes; ", held_pages, " pages are held by ",
      leases_.size(), " leases, ", leases_in_quarantine_,
      " of them in quarantine. Raise [store] capacity, or retry when leases have ended"));
}

Namespace* StoreCore::NamespaceOf(const PrefixNode& node) const {
  const PageSlots& slots = node.pages().back();
  const BlockSlot slot = slots.int2 != 0 ? slots.int2 : slots.bf16;
  CRUMB_CHECK(slot != 0, "page without blocks");
  return namespaces_.at(blocks_[slot].chunk->spec().namespace_id).get();
}

void StoreCore::EvictPage(Namespace* ns, PrefixNode* node) {
  for (const PageEncoding encoding : {PageEncoding::kInt2, PageEncoding::kBf16}) {
    while (const BlockSlot slot = FirstSlot(&node->pages().back(), encoding)) {
      Detach(ns, slot);
      FreeIfUnused(ns, slot);
    }
  }
  RemoveLastPage(ns, node);
  ++counters_.evicted_pages;
}

void StoreCore::EvictTailCopy(BlockSlot slot) {
  Namespace* const ns = namespaces_.at(blocks_[slot].chunk->spec().namespace_id).get();
  Detach(ns, slot);
  FreeIfUnused(ns, slot);
  ++counters_.evicted_tail_copies;
}

// Evicts pages from a leaf's end, down to `first_kept`; returns how many.
uint64_t StoreCore::EvictFrom(Namespace* ns, PrefixNode* node, uint32_t first_kept) {
  uint64_t evicted = 0;
  while (node->is_leaf() && node->end_page() > first_kept &&
         IsPageIdle(blocks_, *node, node->end_page() - 1)) {
    const bool was_last = node->num_pages() == 1;
    EvictPage(ns, node);
    ++evicted;
    if (was_last) {
      break;
    }
  }
  return evicted;
}

absl::StatusOr<EvictResult> StoreCore::Evict(const NamespaceId& namespace_id,
                                             std::span<const uint32_t> tokens) {
  CRUMB_ASSIGN_OR_RETURN(const Namespace* const found, FindNamespace(namespace_id));
  if (tokens.size() % kPageTokens != 0) {
    return absl::InvalidArgumentError(absl::StrCat("tokens has ", tokens.size(),
                                                   " tokens, not a multiple of ", kPageTokens,
                                                   ": only whole pages are evicted"));
  }
  Namespace* const ns = const_cast<Namespace*>(found);
  const PrefixPosition prefix = ns->tree.Match(tokens);
  const size_t used_before = blocks_.used_bytes();
  EvictResult result;
  for (const PrefixNode* node : RadixTree::Path(prefix)) {
    result.held_pages_kept += std::min(node->held_pages(), prefix.pages - node->first_page());
  }
  // All that extends the prefix: parents before children, then backwards. By hand, for a tree may
  // be deeper than the stack.
  std::vector<PrefixNode*> nodes;
  if (size_t{prefix.pages} * kPageTokens == tokens.size()) {
    prefix.node->VisitChildren([&](PrefixNode& child) { nodes.push_back(&child); });
  }
  for (size_t i = 0; i < nodes.size(); ++i) {
    nodes[i]->VisitChildren([&](PrefixNode& child) { nodes.push_back(&child); });
  }
  for (size_t i = nodes.size(); i-- > 0;) {
    result.held_pages_kept += nodes[i]->held_pages();
    result.evicted_pages += EvictFrom(ns, nodes[i], nodes[i]->first_page());
  }
  // What extends it in its own node, and then itself, up to where another prefix needs it.
  PrefixNode* node = prefix.node;
  if (size_t{prefix.pages} * kPageTokens == tokens.size()) {
    const uint32_t held_end = node->first_page() + node->held_pages();
    result.held_pages_kept += held_end - std::min(held_end, prefix.pages);
  } else if (prefix.pages < node->end_page()) {
    node = &ns->tree.root();  // The prefix parts from others within the node: nothing is its own.
  }
  while (!node->is_root()) {
    PrefixNode* const parent = node->parent();
    const uint32_t num_pages = node->num_pages();
    const uint64_t evicted = EvictFrom(ns, node, node->first_page());
    result.evicted_pages += evicted;
    node = evicted == num_pages ? parent : &ns->tree.root();
  }
  result.freed_bytes = used_before - blocks_.used_bytes();
  DropNamespaceIfEmpty(ns);
  return result;
}

}  // namespace crumb::store_internal
