// SPDX-License-Identifier: Apache-2.0
//
// StoreCore: the life of a lease after its lookup, and reads under it.
#include <utility>

#include "absl/strings/str_cat.h"

#include "daemon/store/store_core.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"

namespace crumb::store_internal {

Lease* StoreCore::FindLease(const Session& session, LeaseId id) {
  return session.leases.contains(id) ? leases_.at(id).get() : nullptr;
}

void StoreCore::SetEnd(Lease* lease, absl::Time end) {
  lease_ends_.erase({lease->end, lease->id});
  lease->end = end;
  lease_ends_.emplace(end, lease->id);
}

void StoreCore::Quarantine(Lease* lease, absl::Time from) {
  CRUMB_CHECK(!lease->in_quarantine, "lease ended twice");
  if (const auto session = sessions_.find(lease->session); session != sessions_.end()) {
    session->second->leases.erase(lease->id);
  }
  lease->in_quarantine = true;
  ++leases_in_quarantine_;
  SetEnd(lease, from + options_.quarantine);
}

void StoreCore::DropLease(Lease* lease) {
  if (const auto session = sessions_.find(lease->session); session != sessions_.end()) {
    session->second->leases.erase(lease->id);
  }
  leases_in_quarantine_ -= lease->in_quarantine ? 1u : 0u;
  lease_ends_.erase({lease->end, lease->id});
  for (const BlockSlot slot : lease->window) {
    if (slot != 0) {
      Unhold(lease->ns, slot);
    }
  }
  lease->ns->tree.Unpin(lease->pin);
  leases_.erase(LeaseId(lease->id));  // A copy: the key must outlive the element.
}

void StoreCore::Tick(absl::Time now) {
  while (!lease_ends_.empty() && lease_ends_.begin()->first <= now) {
    Lease* const lease = leases_.at(lease_ends_.begin()->second).get();
    if (lease->in_quarantine) {
      DropLease(lease);
    } else {
      ++counters_.expired_leases;
      Quarantine(lease, lease->end);
    }
  }
}

absl::StatusOr<std::vector<LeaseId>> StoreCore::RenewLeases(SessionId session_id,
                                                            std::span<const LeaseId> leases,
                                                            absl::Time now) {
  CRUMB_ASSIGN_OR_RETURN(const Session* const session, FindSession(session_id));
  std::vector<LeaseId> ended;
  for (const LeaseId id : leases) {
    if (Lease* const lease = FindLease(*session, id); lease != nullptr) {
      SetEnd(lease, now + options_.lease + options_.lease_grace);
    } else {
      ended.push_back(id);
    }
  }
  return ended;
}

absl::Status StoreCore::ReleaseLeases(SessionId session_id, std::span<const LeaseId> leases) {
  CRUMB_ASSIGN_OR_RETURN(const Session* const session, FindSession(session_id));
  for (const LeaseId id : leases) {
    if (Lease* const lease = FindLease(*session, id); lease != nullptr) {
      DropLease(lease);
    }
  }
  return absl::OkStatus();
}

BlockSlot StoreCore::ReadableBlock(const Lease& lease, const PageKey& key) const {
  const uint32_t page = key.page.value();
  const PrefixNode& node = *RadixTree::NodeOf(RadixTree::PositionOf(*lease.pin), page);
  const PageSlots& slots = node.pages()[page - node.first_page()];
  if (key.encoding == PageEncoding::kInt2) {
    return CoveringBlock(slots.int2, lease.heads.Mask());
  }
  if (page < lease.ns->sink_pages()) {
    return CoveringBlock(slots.bf16, lease.heads.Mask());
  }
  return page >= lease.window_first ? lease.window[page - lease.window_first] : 0;
}

absl::StatusOr<ReadHold> StoreCore::BeginRead(SessionId session_id,
                                              LeaseId lease_id,
                                              std::span<const PageKey> keys) {
  CRUMB_ASSIGN_OR_RETURN(const Session* const session, FindSession(session_id));
  const Lease* const lease = FindLease(*session, lease_id);
  if (lease == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("lease ", lease_id.value(), " of session ", session_id.value(),
                     " is over, or never was; look the prefix up again"));
  }
  ReadHold hold;
  for (const PageKey& key : keys) {
    const uint32_t page = key.page.value();
    const BlockSlot slot = page < lease->num_pages() ? ReadableBlock(*lease, key) : 0;
    if (slot == 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "page ", page, " in ", key.encoding == PageEncoding::kInt2 ? "INT2" : "BF16",
          " is not in lease ", lease_id.value(), ", which has pages 0 to ", lease->num_pages() - 1,
          " and BF16 only in the sink and the prompt's recent window"));
    }
    hold.slots.push_back(slot);
  }
  const Geometry& geometry = lease->ns->profile.geometry;
  for (size_t i = 0; i < keys.size(); ++i) {
    StoredBlock& block = blocks_[hold.slots[i]];
    ++block.holds;
    const size_t range_bytes = geometry.HeadRangeBytes(keys[i].encoding);
    hold.pages.push_back(
        {keys[i], block.chunk->Header(block.index),
         block.chunk->Image(block.index)
             .subspan(lease->heads.first * range_bytes, lease->heads.count * range_bytes)});
  }
  hold.ns = lease->ns;
  hold.pin = RadixTree::PinAgain(lease->pin);
  ++reads_;
  return hold;
}

void StoreCore::EndRead(const ReadHold& hold) {
  --reads_;
  for (const BlockSlot slot : hold.slots) {
    Unhold(hold.ns, slot);
  }
  hold.ns->tree.Unpin(hold.pin);
}

}  // namespace crumb::store_internal
