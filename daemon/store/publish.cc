// SPDX-License-Identifier: Apache-2.0
//
// StoreCore: publishes, from the plan of what is missing to the step that makes it visible.
#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"

#include "daemon/store/store_core.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"

namespace crumb::store_internal {
namespace {

// Of one encoding: what was committed in different pieces, and what unfinished publishes of the
// same page write. A bound on memory when many engines start at once with one prompt.
constexpr uint32_t kMaxBlocksPerPage = 4;

}  // namespace

// Claims, holds and lists what the publish needs of one page.
absl::Status StoreCore::PlanBlock(Publish* publish, const PageKey& key, PageSlots* slots) {
  const uint64_t heads = publish->heads.Mask();
  const BlockSlot first = FirstSlot(slots, key.encoding);
  if (const BlockSlot present = CoveringBlock(first, heads); present != 0) {
    if (key.encoding == PageEncoding::kBf16 && key.page.value() >= publish->ns->sink_pages()) {
      ++blocks_[present].holds;
      publish->held_copies.push_back(present);
    }
    return absl::OkStatus();
  }
  PublishItem item{.key = key, .slot = 0, .writing = false};
  uint32_t num_blocks = 0;
  for (BlockSlot slot = first; slot != 0 && item.slot == 0; slot = blocks_[slot].next) {
    StoredBlock& block = blocks_[slot];
    if (((block.heads_present | block.heads_claimed) & heads) == 0) {
      block.heads_claimed |= heads;
      item.slot = slot;
    }
    ++num_blocks;
  }
  if (item.slot == 0 && num_blocks >= kMaxBlocksPerPage) {
    return absl::AbortedError(absl::StrCat(Describe(key), " is being published by ", num_blocks,
                                           " others, or was by ranks that do "
                                           "not share heads; retry when they are done"));
  }
  publish->items.push_back(item);
  return absl::OkStatus();
}

absl::Status StoreCore::PlanPages(Publish* publish) {
  const Namespace& ns = *publish->ns;
  const uint32_t num_pages = publish->num_pages();
  const uint32_t tail_first = num_pages - std::min(num_pages, ns.recent_pages());
  for (PrefixNode* node : RadixTree::Path(RadixTree::PositionOf(*publish->pin))) {
    const uint32_t end = std::min(node->end_page(), num_pages);
    for (uint32_t page = node->first_page(); page < end; ++page) {
      PageSlots* const slots = &node->pages()[page - node->first_page()];
      const bool in_sink = page < ns.sink_pages();
      if (!in_sink) {
        CRUMB_RETURN_IF_ERROR(PlanBlock(publish, {PageIdx(page), PageEncoding::kInt2}, slots));
      }
      if (in_sink || page >= tail_first) {
        CRUMB_RETURN_IF_ERROR(PlanBlock(publish, {PageIdx(page), PageEncoding::kBf16}, slots));
      }
    }
  }
  return absl::OkStatus();
}

PerEncoding StoreCore::NeedOf(const Publish& publish) {
  PerEncoding need{};
  for (const PublishItem& item : publish.items) {
    need[EncodingIndex(item.key.encoding)] += item.slot == 0 ? 1u : 0u;
  }
  return need;
}

absl::Status StoreCore::AllocatePlan(Publish* publish, const PerEncoding& need) {
  CRUMB_RETURN_IF_ERROR(blocks_.Reserve(&publish->ns->pool, need));
  const PrefixPosition end = RadixTree::PositionOf(*publish->pin);
  for (PublishItem& item : publish->items) {
    if (item.slot == 0) {
      item.slot = blocks_.Take(&publish->ns->pool, item.key.encoding, item.key.page);
      blocks_[item.slot].heads_claimed = publish->heads.Mask();
      Attach(publish->ns, RadixTree::NodeOf(end, item.key.page.value()), item.slot);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<PublishPlan> StoreCore::BeginPublish(SessionId session_id,
                                                    std::string_view context_key,
                                                    std::span<const uint32_t> tokens,
                                                    absl::Time now) {
  CRUMB_ASSIGN_OR_RETURN(Session* const session, FindSession(session_id));
  CRUMB_RETURN_IF_ERROR(CheckNotDraining("publishes"));
  CRUMB_RETURN_IF_ERROR(CheckPrompt(context_key, tokens));
  if (tokens.size() % kPageTokens != 0) {
    return absl::InvalidArgumentError(absl::StrCat("tokens has ", tokens.size(),
                                                   " tokens, not a multiple of ", kPageTokens,
                                                   ": only whole pages are published"));
  }
  if (session->publishes.size() >= options_.max_publishes_per_session) {
    return absl::ResourceExhaustedError(
        absl::StrCat("session ", session_id.value(), " has ", session->publishes.size(),
                     " unfinished publishes, the most that it may; commit or abort some first"));
  }
  CRUMB_ASSIGN_OR_RETURN(Namespace* const ns, FindOrMakeNamespace(*session, context_key));
  NextStamp(now);
  auto owned = std::make_unique<Publish>();
  Publish* const publish = owned.get();
  publish->id = PublishId(++last_id_);
  publish->session = session_id;
  publish->ns = ns;
  publish->heads = session->spec.heads;
  // In the tree and pinned first, so that making room cannot take what is there already.
  publish->pin = ns->tree.Pin(ExtendTree(ns, tokens).end);
  publishes_.emplace(publish->id, std::move(owned));
  session->publishes.insert(publish->id);

  absl::Status status = PlanPages(publish);
  const PerEncoding need = NeedOf(*publish);
  const bool has_room = !status.ok() || MakeRoom(ns, need);
  if (status.ok() && has_room) {
    status = AllocatePlan(publish, need);
  }
  if (!status.ok() || !has_room) {
    ++counters_.publishes_refused;
    EndPublish(publish);  // First, so that the numbers are those of the others.
    return has_room ? status : NoRoom(session->spec.profile.geometry, need);
  }
  PublishPlan plan{.id = publish->id, .missing = {}};
  for (const PublishItem& item : publish->items) {
    plan.missing.push_back(item.key);
  }
  return plan;
}

absl::StatusOr<Publish*> StoreCore::FindPublish(SessionId session_id, PublishId id) {
  CRUMB_RETURN_IF_ERROR(FindSession(session_id).status());
  const auto place = publishes_.find(id);
  if (place == publishes_.end() || place->second->session != session_id) {
    return absl::NotFoundError(absl::StrCat("session ", session_id.value(), " has no publish ",
                                            id.value(),
                                            ": it was committed, aborted, or never begun"));
  }
  return place->second.get();
}

void StoreCore::Unclaim(Namespace* ns, BlockSlot slot, uint64_t heads) {
  StoredBlock& block = blocks_[slot];
  CRUMB_CHECK((block.heads_claimed & heads) == heads, "heads that no one claimed");
  block.heads_claimed &= ~heads;
  ReturnCopy(slot, heads);
  FreeIfUnused(ns, slot);
}

void StoreCore::EndPublish(Publish* publish) {
  Namespace* const ns = publish->ns;
  for (const PublishItem& item : publish->items) {
    if (item.slot == 0) {
      continue;
    }
    if (!item.writing) {
      Unclaim(ns, item.slot, publish->heads.Mask());
    }
  }
  for (const BlockSlot slot : publish->held_copies) {
    Unhold(ns, slot);
  }
  PrefixNode* const node = publish->pin->node;
  ns->tree.Unpin(publish->pin);
  TrimUnusedPages(ns, node);
  sessions_.at(publish->session)->publishes.erase(publish->id);
  publishes_.erase(PublishId(publish->id));  // A copy: the key must outlive the element.
  DropNamespaceIfEmpty(ns);
}

absl::Status StoreCore::AbortPublish(SessionId session_id, PublishId id) {
  CRUMB_ASSIGN_OR_RETURN(Publish* const publish, FindPublish(session_id, id));
  ++counters_.publishes_aborted;
  EndPublish(publish);
  return absl::OkStatus();
}

// True if this made something visible, false if another publish had.
bool StoreCore::CommitItem(const Publish& publish,
                           const PublishItem& item,
                           const WrittenBlock& written) {
  StoredBlock& block = blocks_[item.slot];
  PageSlots* const slots = &block.node->pages()[block.page.value() - block.node->first_page()];
  const uint64_t heads = publish.heads.Mask();
  if (CoveringBlock(FirstSlot(slots, item.key.encoding), heads) != 0) {
    Unclaim(publish.ns, item.slot, heads);
    return false;
  }
  std::array<uint32_t, Geometry::kMaxKvHeads> checksums{};
  std::copy(written.head_crc32c.begin(), written.head_crc32c.end(),
            checksums.begin() + publish.heads.first);
  CountPresence(publish.ns, *slots, -1);
  blocks_.MakePresent(item.slot, heads, checksums);
  CountPresence(publish.ns, *slots, 1);
  if (item.key.encoding == PageEncoding::kBf16 &&
      item.key.page.value() >= publish.ns->sink_pages()) {
    block.last_use = last_stamp_;
    queues_.tails.Offer(item.slot, last_stamp_);
  }
  if (written.is_copied && (block.copy.writing & heads) == heads) {
    block.copy.writing &= ~heads;
    SettleCopy(item.slot, heads, checksums);
  }
  ReturnCopy(item.slot, heads);  // Where nothing has been written to it.
  return true;
}

absl::StatusOr<CommitResult> StoreCore::CommitPublish(SessionId session_id,
                                                      PublishId id,
                                                      std::span<const WrittenBlock> written,
                                                      absl::Time now) {
  CRUMB_ASSIGN_OR_RETURN(Publish* const publish, FindPublish(session_id, id));
  CRUMB_ASSIGN_OR_RETURN(const auto blocks, MatchWritten(*publish, written));
  RadixTree::Touch(RadixTree::PositionOf(*publish->pin), NextStamp(now));
  for (const BlockSlot slot : publish->held_copies) {
    blocks_[slot].last_use = last_stamp_;
  }
  CommitResult result;
  std::optional<PageIdx> last_added;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const PublishItem& item = publish->items[i];
    if (blocks[i] == nullptr) {
      Unclaim(publish->ns, item.slot, publish->heads.Mask());
    } else if (CommitItem(*publish, item, *blocks[i]) && last_added != item.key.page) {
      last_added = item.key.page;
      ++result.pages_added;
    }
  }
  publish->items.clear();
  WantCopies(publish->ns, RadixTree::PositionOf(*publish->pin));
  result.pages_present = publish->num_pages() - result.pages_added;
  counters_.published_pages += result.pages_added;
  ++counters_.publishes_committed;
  EndPublish(publish);
  return result;
}

}  // namespace crumb::store_internal
