// SPDX-License-Identifier: Apache-2.0
//
// StoreCore: what operators and metrics see.
#include <algorithm>
#include <tuple>
#include <utility>

#include "daemon/store/store_core.h"
#include "proto/base/status_macros.h"

namespace crumb::store_internal {
namespace {

constexpr size_t kHeadTokens = 16;

}  // namespace

StoreStatus StoreCore::Status(absl::Time now) const {
  StoreStatus status;
  status.draining = draining_;
  status.capacity_bytes = blocks_.arena().capacity_bytes();
  status.chunk_bytes = blocks_.arena().chunk_bytes();
  status.num_chunks = blocks_.arena().num_chunks();
  status.used_bytes = blocks_.used_bytes();
  status.unfinished_bytes = blocks_.unfinished_bytes();
  status.leases = leases_.size() - leases_in_quarantine_;
  status.quarantined_leases = leases_in_quarantine_;
  status.publishes = publishes_.size();
  status.copy_capacity_bytes = copies_.capacity_bytes();
  status.copy_chunk_bytes = copies_.chunk_bytes();
  status.copy_used_bytes = copies_.used_bytes();
  status.copies = copies_.num_copies();
  status.waiting_promotions = promotions_.size();
  status.counters = counters_;
  for (const auto& [id, ns] : namespaces_) {
    status.int2_pages += ns->pages_in[0];
    status.bf16_pages += ns->pages_in[1];
    status.leased_pages += ns->tree.held_pages();
    status.index_nodes += ns->tree.num_nodes();
    status.namespaces.push_back(
        {.id = id,
         .tenant = ns->tenant,
         .profile_id = ns->profile.id,
         .context_key = ns->context_key,
         .pages = ns->pages,
         .used_bytes = ns->used_bytes,
         .bf16_equivalent_bytes = ns->pages * ns->profile.geometry.PageBytes(PageEncoding::kBf16)});
  }
  std::sort(status.namespaces.begin(), status.namespaces.end(), [](const auto& a, const auto& b) {
    return std::tie(a.tenant, a.context_key, a.id) < std::tie(b.tenant, b.context_key, b.id);
  });
  for (const auto& [id, session] : sessions_) {
    status.sessions.push_back({.id = id,
                               .client_name = session->spec.client_name,
                               .pid = session->spec.pid,
                               .tenant = session->spec.tenant,
                               .profile_id = session->spec.profile.id,
                               .age = now - session->since,
                               .leases = session->leases.size(),
                               .publishes = session->publishes.size()});
  }
  std::sort(status.sessions.begin(), status.sessions.end(),
            [](const auto& a, const auto& b) { return a.id < b.id; });
  return status;
}

TreeNodeStatus StoreCore::NodeStatus(const Namespace& ns,
                                     const PrefixNode& node,
                                     absl::Time now) const {
  TreeNodeStatus status;
  status.namespace_id = ns.id;
  status.first_token = node.first_page() * kPageTokens;
  status.num_tokens = node.num_pages() * kPageTokens;
  for (const PageSlots& slots : node.pages()) {
    for (BlockSlot slot = slots.int2; slot != 0; slot = blocks_[slot].next) {
      status.int2_bytes += blocks_[slot].chunk->spec().layout.image_bytes;
    }
    for (BlockSlot slot = slots.bf16; slot != 0; slot = blocks_[slot].next) {
      status.bf16_bytes += blocks_[slot].chunk->spec().layout.image_bytes;
    }
  }
  status.hits = node.hits();
  for (const auto& pin : node.pins()) {
    status.leases += pin->count;
  }
  status.idle = now - absl::FromUnixNanos(node.LastUse(node.first_page()));
  const auto head = node.tokens().first(kHeadTokens);
  status.head_tokens.assign(head.begin(), head.end());
  return status;
}

absl::StatusOr<TreeStatus> StoreCore::Tree(std::optional<NamespaceId> namespace_id,
                                           uint32_t max_nodes,
                                           absl::Time now) const {
  std::vector<const Namespace*> wanted;
  if (namespace_id.has_value()) {
    CRUMB_ASSIGN_OR_RETURN(const Namespace* const ns, FindNamespace(*namespace_id));
    wanted.push_back(ns);
  } else {
    for (const auto& [id, ns] : namespaces_) {
      wanted.push_back(ns.get());
    }
    std::sort(wanted.begin(), wanted.end(),
              [](const auto* a, const auto* b) { return a->id < b->id; });
  }
  TreeStatus tree;
  for (const Namespace* ns : wanted) {
    ListNodes(*ns, max_nodes, now, &tree);
  }
  return tree;
}

void StoreCore::ListNodes(const Namespace& ns,
                          uint32_t max_nodes,
                          absl::Time now,
                          TreeStatus* tree) const {
  // (node, id of its parent). Siblings with the most hits come first.
  std::vector<std::pair<const PrefixNode*, uint32_t>> stack{{&ns.tree.root(), 0}};
  while (!stack.empty() && !tree->truncated) {
    const auto [node, parent_id] = stack.back();
    stack.pop_back();
    uint32_t id = 0;
    if (!node->is_root()) {
      if (tree->nodes.size() == max_nodes) {
        tree->truncated = true;
        return;
      }
      tree->nodes.push_back(NodeStatus(ns, *node, now));
      id = static_cast<uint32_t>(tree->nodes.size());
      tree->nodes.back().id = id;
      tree->nodes.back().parent_id = parent_id;
    }
    const size_t first_child = stack.size();
    node->VisitChildren([&](const PrefixNode& child) { stack.emplace_back(&child, id); });
    std::sort(stack.begin() + static_cast<ptrdiff_t>(first_child), stack.end(),
              [](const auto& a, const auto& b) {
                return std::tuple(a.first->hits(), a.first->tokens()[0]) <
                       std::tuple(b.first->hits(), b.first->tokens()[0]);
              });
  }
}

}  // namespace crumb::store_internal
