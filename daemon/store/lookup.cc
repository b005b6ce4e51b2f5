// SPDX-License-Identifier: Apache-2.0
//
// StoreCore: what of a prompt is there, and the lease on it.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "daemon/store/store_core.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"

namespace crumb::store_internal {

StoreCore::Coverage StoreCore::Cover(const Namespace& ns,
                                     std::span<const uint32_t> tokens,
                                     uint64_t heads,
                                     bool allow_int2_window) const {
  Coverage coverage;
  coverage.position = ns.tree.Match(tokens);
  std::vector<PageContent> contents;
  contents.reserve(coverage.position.pages);
  for (const PrefixNode* node : RadixTree::Path(coverage.position)) {
    for (const PageSlots& slots : node->pages()) {
      const PageContent content{.has_int2 = CoveringBlock(slots.int2, heads) != 0,
                                .has_bf16 = CoveringBlock(slots.bf16, heads) != 0};
      if (contents.size() == coverage.position.pages || (!content.has_int2 && !content.has_bf16)) {
        break;
      }
      contents.push_back(content);
    }
    if (contents.size() < std::min(node->end_page(), coverage.position.pages)) {
      break;  // Unfinished from here on.
    }
  }
  const auto num_tokens = static_cast<uint32_t>(tokens.size());
  const Windows& windows = ns.profile.windows;
  coverage.usable = ComputeUsableLength(num_tokens, contents, windows, allow_int2_window);
  coverage.matched_pages = static_cast<uint32_t>(contents.size());
  const uint32_t recent_first =
      (num_tokens - std::min(num_tokens, windows.recent_tokens)) / kPageTokens;
  uint32_t& first = coverage.window_first = ns.sink_pages();
  while (first < std::min(recent_first, coverage.matched_pages) && contents[first].has_int2) {
    ++first;
  }
  return coverage;
}

PrefixLength StoreCore::LengthOf(const Coverage& coverage) const {
  return {.matched_tokens = coverage.matched_pages * kPageTokens,
          .usable_tokens = coverage.usable.usable_pages * kPageTokens,
          .trimmed_tokens = coverage.usable.trimmed_pages * kPageTokens};
}

absl::StatusOr<LookupResult> StoreCore::Lookup(SessionId session_id,
                                               std::string_view context_key,
                                               std::span<const uint32_t> tokens,
                                               bool allow_int2_window,
                                               absl::Time now) {
  CRUMB_ASSIGN_OR_RETURN(Session* const session, FindSession(session_id));
  CRUMB_RETURN_IF_ERROR(CheckNotDraining("lookups"));
  CRUMB_RETURN_IF_ERROR(CheckPrompt(context_key, tokens));
  Namespace* const ns = FindNamespace(*session, context_key);
  Coverage coverage;
  if (ns != nullptr) {
    coverage = Cover(*ns, tokens, session->heads(), allow_int2_window);
  }
  LookupResult result{.length = LengthOf(coverage), .lease = {}, .pages = {}};
  if (coverage.usable.usable_pages > 0) {
    if (session->leases.size() >= options_.max_leases_per_session) {
      return absl::ResourceExhaustedError(
          absl::StrCat("session ", session_id.value(), " has ", session->leases.size(),
                       " leases, the most that it may; release some, or attach another session"));
    }
    const Lease& lease = GrantLease(session, ns, coverage, now);
    result.lease = lease.id;
    result.pages = PageTable(lease);
    if (session->spec.reads_copies && LacksCopies(result.pages)) {
      WantCopies(ns, RadixTree::PositionOf(*lease.pin));
    }
  }
  ++counters_.lookups;
  counters_.lookup_tokens += tokens.size();
  counters_.hit_tokens += result.length.matched_tokens;
  counters_.usable_tokens += result.length.usable_tokens;
  counters_.trimmed_tokens += result.length.trimmed_tokens;
  return result;
}

Lease& StoreCore::GrantLease(Session* session,
                             Namespace* ns,
                             const Coverage& coverage,
                             absl::Time now) {
  const uint32_t num_pages = coverage.usable.usable_pages;
  const int64_t stamp = NextStamp(now);
  const PrefixPosition end{RadixTree::NodeOf(coverage.position, num_pages - 1), num_pages};
  RadixTree::TouchAsHit(end, stamp);

  auto lease = std::make_unique<Lease>();
  lease->id = LeaseId(++last_id_);
  lease->session = session->id;
  lease->ns = ns;
  lease->heads = session->spec.heads;
  lease->pin = ns->tree.Pin(end);
  lease->window_first = std::min(coverage.window_first, num_pages);
  for (uint32_t page = lease->window_first; page < num_pages; ++page) {
    PrefixNode* const node = RadixTree::NodeOf(end, page);
    const BlockSlot slot =
        CoveringBlock(node->pages()[page - node->first_page()].bf16, session->heads());
    if (slot != 0) {
      ++blocks_[slot].holds;
      blocks_[slot].last_use = stamp;
    }
    lease->window.push_back(slot);
  }
  Lease& result = *lease;
  leases_.emplace(result.id, std::move(lease));
  SetEnd(&result, now + options_.lease + options_.lease_grace);
  session->leases.insert(result.id);
  ++counters_.leases_granted;
  return result;
}

BlockRef StoreCore::RefOf(BlockSlot slot) const {
  const StoredBlock& block = blocks_[slot];
  return {block.chunk->id(), block.index, block.generation};
}

std::optional<BlockRef> StoreCore::CopyRefOf(BlockSlot slot, uint64_t heads) const {
  const BlockCopy& copy = blocks_[slot].copy;
  return (copy.heads & heads) == heads
             ? std::optional<BlockRef>({copy.chunk->id(), copy.index, copy.generation})
             : std::nullopt;
}

bool StoreCore::LacksCopies(const std::vector<PageRef>& table) const {
  return std::any_of(table.begin(), table.end(), [](const PageRef& page) {
    return (page.int2.has_value() && !page.int2_copy.has_value()) ||
           (page.bf16.has_value() && !page.bf16_copy.has_value());
  });
}

std::vector<PageRef> StoreCore::PageTable(const Lease& lease) const {
  const auto session = sessions_.find(lease.session);
  const bool with_copies = session != sessions_.end() && session->second->spec.reads_copies;
  std::vector<PageRef> table(lease.num_pages());
  const uint64_t heads = lease.heads.Mask();
  for (const PrefixNode* node : RadixTree::Path(RadixTree::PositionOf(*lease.pin))) {
    const uint32_t end = std::min(node->end_page(), lease.num_pages());
    for (uint32_t page = node->first_page(); page < end; ++page) {
      const PageSlots& slots = node->pages()[page - node->first_page()];
      const BlockSlot int2 = CoveringBlock(slots.int2, heads);
      const BlockSlot bf16 = page < lease.ns->sink_pages() ? CoveringBlock(slots.bf16, heads)
                             : page >= lease.window_first  ? lease.window[page - lease.window_first]
                                                           : 0;
      CRUMB_DCHECK(int2 != 0 || bf16 != 0, "leased page without rows");
      if (int2 != 0) {
        table[page].int2 = RefOf(int2);
        table[page].int2_copy = with_copies ? CopyRefOf(int2, heads) : std::nullopt;
      }
      if (bf16 != 0) {
        table[page].bf16 = RefOf(bf16);
        table[page].bf16_copy = with_copies ? CopyRefOf(bf16, heads) : std::nullopt;
      }
    }
  }
  return table;
}

absl::StatusOr<PrefixLength> StoreCore::Probe(SessionId session_id,
                                              std::string_view context_key,
                                              std::span<const uint32_t> tokens) const {
  CRUMB_ASSIGN_OR_RETURN(const Session* const session, FindSession(session_id));
  CRUMB_RETURN_IF_ERROR(CheckPrompt(context_key, tokens));
  const Namespace* const ns = FindNamespace(*session, context_key);
  return ns == nullptr ? PrefixLength{} : LengthOf(Cover(*ns, tokens, session->heads(), false));
}

absl::StatusOr<PrefixLength> StoreCore::Probe(const NamespaceId& namespace_id,
                                              std::span<const uint32_t> tokens) const {
  CRUMB_RETURN_IF_ERROR(CheckPrompt({}, tokens));
  CRUMB_ASSIGN_OR_RETURN(const Namespace* const ns, FindNamespace(namespace_id));
  const HeadRange all = HeadRange{}.Resolve(ns->profile.geometry.num_kv_heads);
  return LengthOf(Cover(*ns, tokens, all.Mask(), false));
}

}  // namespace crumb::store_internal
