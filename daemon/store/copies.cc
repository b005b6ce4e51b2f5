// SPDX-License-Identifier: Apache-2.0
//
// StoreCore: copies of pages in the tier beside the host arena. Prefixes wait in a queue, each
// pinned by its last page, for the thread that copies; it takes their blocks in order of pages.
//
// Which copies go first: those used longest ago. Since no page is used later than its parent
// (radix_tree.h), and of one node's pages the later ones are offered first, leaves go before what
// they extend without any further care.
#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"

#include "daemon/store/store_core.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"

namespace crumb::store_internal {
namespace {

// Prefixes that wait to be copied. One more is not: the next lookup asks for it again.
constexpr size_t kMaxPromotions = 64;

// The lowest run of adjacent heads.
HeadRange FirstRun(uint64_t heads) {
  const auto first = static_cast<uint32_t>(std::countr_zero(heads));
  return {first, static_cast<uint32_t>(std::countr_one(heads >> first))};
}

}  // namespace

bool StoreCore::MayHaveCopies(const Namespace& ns) const {
  return copies_.has_tier() && copies_.tier().CheckGeometry(ns.profile.geometry).ok();
}

void StoreCore::WantCopies(Namespace* ns, PrefixPosition prefix) {
  if (prefix.pages == 0 || promotions_.size() >= kMaxPromotions || !MayHaveCopies(*ns)) {
    return;
  }
  PrefixPin* const pin = ns->tree.Pin(prefix);
  for (const Promotion& waiting : promotions_) {
    if (waiting.pin == pin && waiting.next_page == 0) {
      ns->tree.Unpin(pin);
      return;
    }
  }
  promotions_.push_back({.ns = ns, .pin = pin});
}

bool StoreCore::IsCopyIdle(BlockSlot slot) const {
  const StoredBlock& block = blocks_[slot];
  if (!block.IsIdle() || block.copy.writing != 0) {
    return false;
  }
  const bool is_tail = queues_.tails.Contains(slot);
  return is_tail || !block.node->IsHeld(block.page.value());
}

int64_t StoreCore::CopyUse(BlockSlot slot) const {
  const StoredBlock& block = blocks_[slot];
  return queues_.tails.Contains(slot) ? block.last_use : block.node->LastUse(block.page.value());
}

void StoreCore::DropCopy(BlockSlot slot) {
  StoredBlock& block = blocks_[slot];
  if (block.copy.chunk != nullptr) {
    copy_queue_.Withdraw(CopyItem::Of(block.page, slot));
    copies_.Free(&block.copy);
  }
}

// One pass over the copies used before `before`. What was used later than told is moved on, and
// passed over: then another pass may find more.
std::optional<std::vector<BlockSlot>> StoreCore::FindCopiesToDrop(const Chunk& home,
                                                                  int64_t before,
                                                                  bool* moved_any) {
  absl::flat_hash_map<const Chunk*, std::vector<BlockSlot>> idle;
  std::vector<std::pair<CopyItem, int64_t>> stale;
  std::optional<std::vector<BlockSlot>> found;
  for (const auto& [told, item] : copy_queue_.ordered()) {
    if (told >= before || found.has_value()) {
      break;
    }
    if (const int64_t used = CopyUse(item.slot); used > told) {
      stale.emplace_back(item, used);
      continue;
    }
    if (!IsCopyIdle(item.slot)) {
      continue;
    }
    const Chunk* const chunk = blocks_[item.slot].copy.chunk;
    std::vector<BlockSlot>& of_chunk = idle[chunk];
    of_chunk.push_back(item.slot);
    const bool is_own = chunk->spec().namespace_id == home.spec().namespace_id &&
                        chunk->spec().encoding == home.spec().encoding;
    if (is_own) {
      found.emplace({item.slot});
    } else if (of_chunk.size() == chunk->num_used()) {
      found = std::move(of_chunk);
    }
  }
  for (const auto& [item, used] : stale) {
    copy_queue_.Offer(item, used);
  }
  *moved_any = !stale.empty();
  return found;
}

// Drops copies used before `before` until a block like `home`'s is free, or a segment is spent.
bool StoreCore::MakeCopyRoom(const Chunk& home, int64_t before) {
  bool moved_any = true;
  while (moved_any) {
    const auto victims = FindCopiesToDrop(home, before, &moved_any);
    if (victims.has_value()) {
      for (const BlockSlot slot : *victims) {
        DropCopy(slot);
        ++counters_.dropped_copies;
      }
      return true;
    }
  }
  return false;
}

bool StoreCore::TakeCopyPlace(BlockSlot slot, int64_t used) {
  StoredBlock& block = blocks_[slot];
  return block.copy.chunk != nullptr || copies_.Take(*block.chunk, &block.copy) ||
         (MakeCopyRoom(*block.chunk, used) && copies_.Take(*block.chunk, &block.copy));
}

CopyPlace StoreCore::PlaceOf(const StoredBlock& block, size_t offset) const {
  return {.segment = *block.copy.chunk->spec().segment,
          .offset = copies_.image_offset(block.copy) + offset};
}

// Heads of a copy have arrived: they become readable.
void StoreCore::SettleCopy(BlockSlot slot,
                           uint64_t heads,
                           std::span<const uint32_t, Geometry::kMaxKvHeads> head_crc32c) {
  StoredBlock& block = blocks_[slot];
  BlockCopy& copy = block.copy;
  if (copy.heads == 0) {
    copy.chunk->Settle(copy.index, block.page, heads, head_crc32c);
    copy.generation = copy.chunk->generation(copy.index);
    copy_queue_.Offer(CopyItem::Of(block.page, slot), CopyUse(slot));
    ++counters_.copies;
  } else {
    copy.chunk->AddHeads(copy.index, heads, head_crc32c);
  }
  copy.heads |= heads;
}

void StoreCore::FreeCopyIfUnused(BlockCopy* copy) {
  if (copy->chunk != nullptr && copy->heads == 0 && copy->writing == 0) {
    copies_.Free(copy);
  }
}

std::optional<CopyPlace> StoreCore::ReserveCopy(const WriteHold& hold, size_t index) {
  const BlockSlot slot = hold.slots[index];
  StoredBlock& block = blocks_[slot];
  if (stopped_copying_ || !MayHaveCopies(*hold.ns) || !TakeCopyPlace(slot, last_stamp_)) {
    return std::nullopt;
  }
  block.copy.writing |= hold.heads;
  return PlaceOf(block, static_cast<size_t>(std::countr_zero(hold.heads)) *
                            hold.ns->profile.geometry.HeadRangeBytes(block.encoding()));
}

void StoreCore::ReturnCopy(BlockSlot slot, uint64_t heads) {
  BlockCopy& copy = blocks_[slot].copy;
  copy.writing &= ~heads;
  FreeCopyIfUnused(&copy);
}

// Plans the copying of the heads of a block that are not copied yet. False: there is no place.
bool StoreCore::PlanCopy(Namespace* ns, BlockSlot slot, int64_t used, CopyHold* hold) {
  StoredBlock& block = blocks_[slot];
  uint64_t missing = block.heads_present & ~(block.copy.heads | block.copy.writing);
  if (missing == 0) {
    return true;
  }
  if (!TakeCopyPlace(slot, used)) {
    return false;
  }
  const PageHeader header = block.chunk->Header(block.index);
  const size_t range_bytes = ns->profile.geometry.HeadRangeBytes(block.encoding());
  while (missing != 0) {
    const HeadRange run = FirstRun(missing);
    PageCopy copy{.place = PlaceOf(block, run.first * range_bytes),
                  .source = block.chunk->Image(block.index)
                                .subspan(run.first * range_bytes, run.count * range_bytes),
                  .head_crc32c = {}};
    const auto* const checksums = header.head_crc32c.data() + run.first;
    copy.head_crc32c.assign(checksums, checksums + run.count);
    hold->bytes += copy.source.size();
    hold->copies.push_back(std::move(copy));
    hold->items.push_back({ns, slot, run.Mask()});
    block.copy.writing |= run.Mask();
    ++block.holds;
    missing &= ~run.Mask();
  }
  return true;
}

// Of one page: INT2 wherever it is, BF16 in the sink and the prefix's tail.
bool StoreCore::PlanPageCopies(const Promotion& promotion, uint32_t page, CopyHold* hold) {
  const PrefixPosition end = RadixTree::PositionOf(*promotion.pin);
  Namespace* const ns = promotion.ns;
  PrefixNode* const node = RadixTree::NodeOf(end, page);
  const PageSlots& slots = node->pages()[page - node->first_page()];
  const int64_t used = node->LastUse(page);
  for (BlockSlot slot = slots.int2; slot != 0; slot = blocks_[slot].next) {
    if (!PlanCopy(ns, slot, used, hold)) {
      return false;
    }
  }
  if (page >= ns->sink_pages() && page + ns->recent_pages() < end.pages) {
    return true;
  }
  for (BlockSlot slot = slots.bf16; slot != 0; slot = blocks_[slot].next) {
    if (!PlanCopy(ns, slot, used, hold)) {
      return false;
    }
  }
  return true;
}

CopyHold StoreCore::BeginCopies(size_t max_bytes) {
  CopyHold hold;
  while (!stopped_copying_ && !promotions_.empty() && hold.bytes < max_bytes) {
    Promotion& promotion = promotions_.front();
    const uint32_t num_pages = promotion.pin->last_page + 1;
    bool has_room = true;
    while (promotion.next_page < num_pages && has_room && hold.bytes < max_bytes) {
      has_room = PlanPageCopies(promotion, promotion.next_page, &hold);
      promotion.next_page += has_room ? 1u : 0u;
    }
    if (promotion.next_page < num_pages && has_room) {
      break;  // The batch is full.
    }
    if (!has_room && copies_.num_unready_segments() > 0 && !std::exchange(promotion.waited, true)) {
      break;  // A segment that was given up may be ready by the next call.
    }
    counters_.unplaced_copies += has_room ? 0u : 1u;
    Namespace* const ns = promotion.ns;
    ns->tree.Unpin(promotion.pin);
    promotions_.pop_front();
  }
  copying_ += hold.items.empty() ? 0u : 1u;
  return hold;
}

void StoreCore::EndCopies(const CopyHold& hold) {
  --copying_;
  for (size_t i = 0; i < hold.items.size(); ++i) {
    const CopyHold::Item& item = hold.items[i];
    BlockCopy& copy = blocks_[item.slot].copy;
    copy.writing &= ~item.heads;
    if (item.arrived) {
      std::array<uint32_t, Geometry::kMaxKvHeads> checksums{};
      const HeadRange run = FirstRun(item.heads);
      std::copy(hold.copies[i].head_crc32c.begin(), hold.copies[i].head_crc32c.end(),
                checksums.begin() + run.first);
      SettleCopy(item.slot, item.heads, checksums);
    } else {
      ++counters_.failed_copies;
    }
    FreeCopyIfUnused(&copy);
    Unhold(item.ns, item.slot);
  }
}

absl::StatusOr<CopyChunkFds> StoreCore::GetCopyChunk(SessionId session_id, ChunkId chunk_id) const {
  CRUMB_ASSIGN_OR_RETURN(const Session* const session, FindSession(session_id));
  if (!copies_.has_tier()) {
    return absl::FailedPreconditionError(
        "this daemon keeps no pages in a GPU's memory ([store] gpu_arena): map host memory");
  }
  const Chunk* const chunk = copies_.Find(chunk_id);
  if (chunk == nullptr) {
    return absl::NotFoundError(absl::StrCat("chunk ", chunk_id.value(),
                                            " of copies is not there (any more); look the prefix "
                                            "up again"));
  }
  CRUMB_RETURN_IF_ERROR(CheckMayMap(*session, *chunk));
  CopyChunkFds result{.headers = {},
                      .memory = {},
                      .memory_bytes = copies_.tier().segment_bytes(),
                      .num_blocks = chunk->num_blocks()};
  CRUMB_ASSIGN_OR_RETURN(result.headers, chunk->Duplicate());
  CRUMB_ASSIGN_OR_RETURN(result.memory, copies_.tier().Share(*chunk->spec().segment));
  return result;
}

}  // namespace crumb::store_internal
