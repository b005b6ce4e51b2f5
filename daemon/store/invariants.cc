// SPDX-License-Identifier: Apache-2.0
//
// StoreCore::CheckInvariants: visits everything, counts it again, and compares. For tests.
#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"

#include "daemon/store/store_core.h"
#include "proto/base/status_macros.h"

#define CRUMB_INVARIANT(condition, ...)                                 \
  do {                                                                  \
    if (!(condition)) {                                                 \
      return absl::InternalError(absl::StrCat("store: ", __VA_ARGS__)); \
    }                                                                   \
  } while (false)

namespace crumb::store_internal {

// What is found while visiting, to be compared with what is counted.
struct StoreCore::Census {
  std::vector<bool> seen;  // [slot]: attached to a page.
  uint64_t used_bytes = 0;
  uint64_t unfinished_bytes = 0;
  // Of the namespace at hand.
  uint64_t pages = 0;
  uint64_t pages_in[2] = {};
  size_t leaves = 0;  // Of all.
  size_t tails = 0;
  size_t copies = 0;
  size_t readable_copies = 0;
};

absl::Status StoreCore::CheckBlock(const Namespace& ns,
                                   const PrefixNode& node,
                                   uint32_t page,
                                   BlockSlot slot,
                                   Census* census) const {
  const StoredBlock& block = blocks_[slot];
  CRUMB_INVARIANT(block.chunk != nullptr, "page ", page, " has the unused slot ", slot);
  CRUMB_INVARIANT(!census->seen[slot], "block ", slot, " belongs to two pages");
  census->seen[slot] = true;
  CRUMB_INVARIANT(block.node == &node && block.page.value() == page, "block ", slot,
                  " does not know its page ", page);
  CRUMB_INVARIANT(block.chunk->spec().namespace_id == ns.id, "block ", slot,
                  " lies in a chunk of another namespace");
  CRUMB_INVARIANT((block.heads_present & block.heads_claimed) == 0, "block ", slot,
                  " has heads that are present and claimed");
  CRUMB_INVARIANT((block.heads_present | block.heads_claimed) != 0, "block ", slot, " of page ",
                  page, " is there for nobody");
  const uint64_t generation = block.chunk->generation(block.index).value();
  CRUMB_INVARIANT((generation % 2 == 0) == (block.heads_present != 0), "block ", slot,
                  " has generation ", generation, " with heads ", block.heads_present);
  const size_t bytes = block.chunk->spec().layout.block_stride();
  census->used_bytes += bytes;
  census->unfinished_bytes += block.heads_present == 0 ? bytes : 0;
  CRUMB_RETURN_IF_ERROR(CheckCopy(ns, slot, census));
  if (block.heads_present == 0) {
    return absl::OkStatus();
  }
  const PageHeader header = block.chunk->Header(block.index);
  CRUMB_RETURN_IF_ERROR(CheckPageHeader(header, {.profile_id = ns.profile.id,
                                                 .namespace_id = ns.id,
                                                 .encoding = block.encoding(),
                                                 .generation = block.generation,
                                                 .page_idx = block.page}));
  CRUMB_INVARIANT(header.heads_present == block.heads_present, "header of block ", slot,
                  " has other heads than the block");
  const bool is_tail = block.encoding() == PageEncoding::kBf16 && page >= ns.sink_pages();
  CRUMB_INVARIANT(queues_.tails.Contains(slot) == is_tail, "block ", slot,
                  is_tail ? " is a tail that cannot be evicted" : " is in the queue of tails");
  census->tails += is_tail ? 1u : 0u;
  return absl::OkStatus();
}

absl::Status StoreCore::CheckCopy(const Namespace& ns, BlockSlot slot, Census* census) const {
  const StoredBlock& block = blocks_[slot];
  const BlockCopy& copy = block.copy;
  const bool is_queued = copy_queue_.Contains(CopyItem::Of(block.page, slot));
  CRUMB_INVARIANT(is_queued == (copy.heads != 0), "block ", slot,
                  is_queued ? " has no copy to drop" : " has a copy that cannot be dropped");
  if (copy.chunk == nullptr) {
    CRUMB_INVARIANT((copy.heads | copy.writing) == 0, "block ", slot, " has heads of no copy");
    return absl::OkStatus();
  }
  ++census->copies;
  census->readable_copies += copy.heads != 0 ? 1u : 0u;
  CRUMB_INVARIANT((copy.heads | copy.writing) != 0, "block ", slot, " has a copy for nobody");
  const uint64_t known = block.heads_present | block.heads_claimed;
  CRUMB_INVARIANT((copy.heads & copy.writing) == 0 && (copy.heads & ~block.heads_present) == 0 &&
                      (copy.writing & ~known) == 0,
                  "block ", slot, " has heads ", copy.heads, " in its copy, ", copy.writing,
                  " on their way there, ", block.heads_present, " itself, and ",
                  block.heads_claimed, " claimed");
  CRUMB_INVARIANT((copy.writing & ~block.heads_claimed) == 0 || block.holds > 0, "block ", slot,
                  " is being copied and held by nobody");
  CRUMB_INVARIANT(copies_.Find(copy.chunk->id()) == copy.chunk &&
                      copy.chunk->spec().namespace_id == ns.id &&
                      copy.chunk->spec().encoding == block.encoding(),
                  "the copy of block ", slot, " lies in a chunk of something else");
  if (copy.heads == 0) {
    return absl::OkStatus();
  }
  const PageHeader header = copy.chunk->Header(copy.index);
  CRUMB_RETURN_IF_ERROR(CheckPageHeader(header, {.profile_id = ns.profile.id,
                                                 .namespace_id = ns.id,
                                                 .encoding = block.encoding(),
                                                 .generation = copy.generation,
                                                 .page_idx = block.page}));
  CRUMB_INVARIANT(header.heads_present == copy.heads, "header of the copy of block ", slot,
                  " has other heads than it");
  return absl::OkStatus();
}

absl::Status StoreCore::CheckCopies(const Census& census) const {
  size_t used = 0;
  size_t bytes = 0;
  bool any_empty = false;
  copies_.VisitChunks([&](const Chunk& chunk) {
    used += chunk.num_used();
    bytes += chunk.num_used() * chunk.spec().layout.block_stride();
    any_empty = any_empty || chunk.num_used() == 0;
  });
  CRUMB_INVARIANT(!any_empty, "a chunk of copies that is empty was kept");
  CRUMB_INVARIANT(used == census.copies && used == copies_.num_copies(), "counts ",
                  copies_.num_copies(), " copies, has ", census.copies, ", and chunks hold ", used);
  CRUMB_INVARIANT(bytes == copies_.used_bytes(), "counts ", copies_.used_bytes(),
                  " bytes of copies, has ", bytes);
  CRUMB_INVARIANT(census.readable_copies == copy_queue_.size(),
                  "the queue of copies holds what is not there");
  CRUMB_INVARIANT(copies_.chunk_bytes() <= copies_.capacity_bytes(), "chunks of copies hold ",
                  copies_.chunk_bytes(), " bytes of ", copies_.capacity_bytes());
  return absl::OkStatus();
}

absl::Status StoreCore::CheckNode(const Namespace& ns,
                                  const PrefixNode& node,
                                  Census* census) const {
  for (uint32_t page = node.first_page(); page < node.end_page(); ++page) {
    const PageSlots& slots = node.pages()[page - node.first_page()];
    CRUMB_INVARIANT(slots.int2 != 0 || slots.bf16 != 0 || node.IsHeld(page), "page ", page,
                    " is in the tree with no block and no publish");
    for (const BlockSlot first : {slots.int2, slots.bf16}) {
      for (BlockSlot slot = first; slot != 0; slot = blocks_[slot].next) {
        CRUMB_RETURN_IF_ERROR(CheckBlock(ns, node, page, slot, census));
      }
    }
    const bool in_int2 = AnyPresent(slots.int2);
    const bool in_bf16 = AnyPresent(slots.bf16);
    CRUMB_INVARIANT(page < ns.sink_pages() ? !in_int2 : in_int2 || !in_bf16, "page ", page,
                    " is in an encoding that it must not be in alone");
    census->pages += in_int2 || in_bf16 ? 1u : 0u;
    census->pages_in[0] += in_int2 ? 1u : 0u;
    census->pages_in[1] += in_bf16 ? 1u : 0u;
  }
  CRUMB_INVARIANT(queues_.leaves.Contains(const_cast<PrefixNode*>(&node)) == node.is_leaf(),
                  "a node and the queue of leaves do not agree whether it is one");
  census->leaves += node.is_leaf() ? 1u : 0u;
  return absl::OkStatus();
}

absl::Status StoreCore::CheckNamespace(const Namespace& ns, Census* census) const {
  CRUMB_RETURN_IF_ERROR(ns.tree.CheckInvariants());
  CRUMB_INVARIANT(!ns.tree.empty() || !ns.pool.empty(), "an empty namespace was kept");
  census->pages = census->pages_in[0] = census->pages_in[1] = 0;
  // Each with the heads that its parent's last page has: what is after a page must be reachable.
  std::vector<const PrefixNode*> stack;
  ns.tree.root().VisitChildren([&](const PrefixNode& child) { stack.push_back(&child); });
  while (!stack.empty()) {
    const PrefixNode& node = *stack.back();
    stack.pop_back();
    CRUMB_RETURN_IF_ERROR(CheckNode(ns, node, census));
    CRUMB_RETURN_IF_ERROR(CheckReachable(ns, node));
    node.VisitChildren([&](const PrefixNode& child) { stack.push_back(&child); });
  }
  CRUMB_INVARIANT(census->pages == ns.pages && census->pages_in[0] == ns.pages_in[0] &&
                      census->pages_in[1] == ns.pages_in[1],
                  "namespace ", ns.id.Short(), " counts ", ns.pages, " pages, has ", census->pages);
  return absl::OkStatus();
}

absl::Status StoreCore::CheckReachable(const Namespace& ns, const PrefixNode& node) const {
  const auto heads_of = [&](const PageSlots& slots, uint32_t page) {
    uint64_t heads = 0;
    for (BlockSlot slot = page < ns.sink_pages() ? slots.bf16 : slots.int2; slot != 0;
         slot = blocks_[slot].next) {
      heads |= blocks_[slot].heads_present;
    }
    return heads;
  };
  uint64_t before = ~uint64_t{0};
  if (const PrefixNode* parent = node.parent(); !parent->is_root()) {
    before = heads_of(parent->pages().back(), parent->end_page() - 1);
  }
  for (uint32_t page = node.first_page(); page < node.end_page(); ++page) {
    const uint64_t heads = heads_of(node.pages()[page - node.first_page()], page);
    CRUMB_INVARIANT((heads & ~before) == 0, "page ", page, " has heads ", heads,
                    " that the page before it, with ", before, ", has not");
    before = heads;
  }
  return absl::OkStatus();
}

absl::Status StoreCore::CheckOwners() const {
  absl::flat_hash_map<const PrefixPin*, uint32_t> pins;
  size_t quarantined = 0;
  for (const auto& [id, lease] : leases_) {
    ++pins[lease->pin];
    quarantined += lease->in_quarantine ? 1u : 0u;
    const auto session = sessions_.find(lease->session);
    const bool in_force = session != sessions_.end() && session->second->leases.contains(id);
    CRUMB_INVARIANT(in_force == !lease->in_quarantine, "lease ", id.value(),
                    " and its session do not agree whether it is in force");
    CRUMB_INVARIANT(lease_ends_.contains({lease->end, id}), "lease ", id.value(), " never ends");
  }
  for (const auto& [id, publish] : publishes_) {
    ++pins[publish->pin];
    const auto session = sessions_.find(publish->session);
    CRUMB_INVARIANT(session != sessions_.end() && session->second->publishes.contains(id),
                    "publish ", id.value(), " of a session that does not know it");
  }
  for (const Promotion& promotion : promotions_) {
    ++pins[promotion.pin];
  }
  uint64_t counted = 0;
  for (const auto& [pin, count] : pins) {
    CRUMB_INVARIANT(pin->count >= count, "a pin has fewer holders than leases and publishes");
    counted += pin->count - count;
  }
  CRUMB_INVARIANT(counted <= reads_, "pins have ", counted, " holders more than there are reads");
  CRUMB_INVARIANT(lease_ends_.size() == leases_.size() && quarantined == leases_in_quarantine_,
                  "leases and their ends differ in number");
  size_t leases = 0;
  size_t publishes = 0;
  for (const auto& [id, session] : sessions_) {
    leases += session->leases.size();
    publishes += session->publishes.size();
  }
  CRUMB_INVARIANT(leases + quarantined == leases_.size() && publishes == publishes_.size(),
                  "sessions own leases or publishes that are not there");
  return absl::OkStatus();
}

absl::Status StoreCore::CheckInvariants() const {
  const Arena& arena = blocks_.arena();
  CRUMB_INVARIANT(arena.chunk_bytes() <= arena.capacity_bytes(), "chunks hold ",
                  arena.chunk_bytes(), " bytes of ", arena.capacity_bytes());
  Census census;
  census.seen.resize(blocks_.num_slots());
  for (const auto& [id, ns] : namespaces_) {
    CRUMB_RETURN_IF_ERROR(CheckNamespace(*ns, &census));
  }
  CRUMB_INVARIANT(census.leaves == queues_.leaves.size() && census.tails == queues_.tails.size(),
                  "queues of eviction hold what is not there");
  size_t used_blocks = 0;
  size_t chunk_bytes = 0;
  absl::Status status;
  arena.VisitChunks([&](const Chunk& chunk) {
    used_blocks += chunk.num_used();
    chunk_bytes += chunk.bytes();
    if (chunk.num_used() == 0 || !namespaces_.contains(chunk.spec().namespace_id)) {
      status = absl::InternalError("store: a chunk that is empty, or of no namespace, was kept");
    }
  });
  CRUMB_RETURN_IF_ERROR(status);
  for (BlockSlot slot = 1; slot < blocks_.num_slots(); ++slot) {
    const StoredBlock& block = blocks_[slot];
    used_blocks -= block.chunk != nullptr ? 1u : 0u;
    if (block.chunk != nullptr && !census.seen[slot]) {
      CRUMB_INVARIANT(block.node == nullptr && !block.IsIdle(), "block ", slot, " is leaked");
      census.used_bytes += block.chunk->spec().layout.block_stride();
    }
  }
  CRUMB_INVARIANT(used_blocks == 0 && chunk_bytes == arena.chunk_bytes(),
                  "chunks and blocks differ in number");
  CRUMB_INVARIANT(census.used_bytes == blocks_.used_bytes(), "counts ", blocks_.used_bytes(),
                  " bytes in blocks, has ", census.used_bytes);
  CRUMB_INVARIANT(census.unfinished_bytes == blocks_.unfinished_bytes(), "counts ",
                  blocks_.unfinished_bytes(), " unfinished bytes, has ", census.unfinished_bytes);
  CRUMB_RETURN_IF_ERROR(CheckCopies(census));
  return CheckOwners();
}

}  // namespace crumb::store_internal
