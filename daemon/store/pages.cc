// SPDX-License-Identifier: Apache-2.0
//
// StoreCore: the blocks of pages in the tree, and the ends of both.
#include "daemon/store/store_core.h"
#include "proto/base/check.h"

namespace crumb::store_internal {

BlockSlot& StoreCore::FirstSlot(PageSlots* slots, PageEncoding encoding) {
  return encoding == PageEncoding::kInt2 ? slots->int2 : slots->bf16;
}

BlockSlot StoreCore::CoveringBlock(BlockSlot first, uint64_t heads) const {
  BlockSlot slot = first;
  while (slot != 0 && (blocks_[slot].heads_present & heads) != heads) {
    slot = blocks_[slot].next;
  }
  return slot;
}

bool StoreCore::AnyPresent(BlockSlot first) const {
  for (BlockSlot slot = first; slot != 0; slot = blocks_[slot].next) {
    if (blocks_[slot].heads_present != 0) {
      return true;
    }
  }
  return false;
}

void StoreCore::CountPresence(Namespace* ns, const PageSlots& slots, int change) {
  const auto add = static_cast<uint64_t>(change);  // Wraps around for -1.
  const bool in_int2 = AnyPresent(slots.int2);
  const bool in_bf16 = AnyPresent(slots.bf16);
  ns->pages_in[0] += in_int2 ? add : 0;
  ns->pages_in[1] += in_bf16 ? add : 0;
  ns->pages += in_int2 || in_bf16 ? add : 0;
}

void StoreCore::Attach(Namespace* ns, PrefixNode* node, BlockSlot slot) {
  StoredBlock& block = blocks_[slot];
  block.node = node;
  ns->used_bytes += block.chunk->spec().layout.block_stride();
  PageSlots& slots = node->pages()[block.page.value() - node->first_page()];
  BlockSlot* last = &FirstSlot(&slots, block.encoding());
  while (*last != 0) {
    last = &blocks_[*last].next;
  }
  *last = slot;
}

void StoreCore::Detach(Namespace* ns, BlockSlot slot) {
  StoredBlock& block = blocks_[slot];
  PageSlots& slots = block.node->pages()[block.page.value() - block.node->first_page()];
  CountPresence(ns, slots, -1);
  BlockSlot* link = &FirstSlot(&slots, block.encoding());
  while (*link != slot) {
    CRUMB_CHECK(*link != 0, "block that its page does not know");
    link = &blocks_[*link].next;
  }
  *link = block.next;
  block.next = 0;
  DropCopy(slot);  // While it is in its page: a copy never outlives what it is of.
  block.node = nullptr;
  CountPresence(ns, slots, 1);
  queues_.tails.Withdraw(slot);
}

void StoreCore::FreeIfUnused(Namespace* ns, BlockSlot slot) {
  StoredBlock& block = blocks_[slot];
  if (!block.IsIdle()) {
    return;
  }
  if (block.node != nullptr && block.heads_present == 0) {
    Detach(ns, slot);
  }
  if (block.node == nullptr) {
    ns->used_bytes -= block.chunk->spec().layout.block_stride();
    blocks_.Free(&ns->pool, slot);
  }
}

void StoreCore::Unhold(Namespace* ns, BlockSlot slot) {
  StoredBlock& block = blocks_[slot];
  CRUMB_CHECK(block.holds > 0, "block held by nobody");
  --block.holds;
  FreeIfUnused(ns, slot);
}

RadixTree::Extension StoreCore::ExtendTree(Namespace* ns, std::span<const uint32_t> tokens) {
  const RadixTree::Extension extension = ns->tree.Extend(tokens, last_stamp_);
  if (extension.split_off != nullptr) {
    for (const PageSlots& slots : extension.split_off->pages()) {
      for (const BlockSlot first : {slots.int2, slots.bf16}) {
        for (BlockSlot slot = first; slot != 0; slot = blocks_[slot].next) {
          blocks_[slot].node = extension.split_off;
        }
      }
    }
  }
  PrefixNode* const end = extension.end.node;
  if (end->is_leaf()) {
    queues_.leaves.Offer(end, end->LastUse(end->end_page() - 1));
  }
  queues_.leaves.Withdraw(end->parent());
  return extension;
}

void StoreCore::RemoveLastPage(Namespace* ns, PrefixNode* node) {
  if (node->num_pages() == 1) {
    queues_.leaves.Withdraw(node);
  }
  PrefixNode* const end = ns->tree.RemoveLastPage(node);
  if (end != node && end->is_leaf() && !end->is_root()) {
    queues_.leaves.Offer(end, end->LastUse(end->end_page() - 1));
  }
}

void StoreCore::TrimUnusedPages(Namespace* ns, PrefixNode* node) {
  while (!node->is_root() && node->is_leaf() && !node->IsHeld(node->end_page() - 1)) {
    const PageSlots& slots = node->pages().back();
    if (slots.int2 != 0 || slots.bf16 != 0) {
      return;
    }
    PrefixNode* const next = node->num_pages() > 1 ? node : node->parent();
    RemoveLastPage(ns, node);
    node = next;
  }
}

}  // namespace crumb::store_internal
