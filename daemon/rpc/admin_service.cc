// SPDX-License-Identifier: Apache-2.0
#include "daemon/rpc/admin_service.h"

#include <optional>

#include "absl/strings/str_cat.h"

#include "daemon/log/log.h"
#include "daemon/rpc/request.h"
#include "daemon/rpc/unary_call.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

constexpr uint32_t kDefaultTreeNodes = 1000;
constexpr uint32_t kMaxTreeNodes = 100000;

void SetDigest(const Digest& digest, std::string* field) {
  field->assign(reinterpret_cast<const char*>(digest.bytes.data()), digest.bytes.size());
}

void FillTotals(const StoreStatus& status, v1::GetStatusReply& reply) {
  reply.set_draining(status.draining);
  reply.set_capacity_bytes(status.capacity_bytes);
  reply.set_chunk_bytes(status.chunk_bytes);
  reply.set_used_bytes(status.used_bytes);
  reply.set_int2_pages(status.int2_pages);
  reply.set_bf16_pages(status.bf16_pages);
  reply.set_leases(status.leases);
  reply.set_leased_pages(status.leased_pages);
  reply.set_publishes(status.publishes);
  reply.set_quarantined_bytes(status.quarantined_bytes);
  reply.set_gpu_capacity_bytes(status.copy_capacity_bytes);
  reply.set_gpu_used_bytes(status.copy_used_bytes);
  reply.set_gpu_copies(status.copies);
}

void FillCounters(const StoreCounters& counters, const Metrics& metrics, v1::Counters& reply) {
  reply.set_lookups(counters.lookups);
  reply.set_lookup_tokens(counters.lookup_tokens);
  reply.set_hit_tokens(counters.hit_tokens);
  reply.set_usable_tokens(counters.usable_tokens);
  reply.set_trimmed_tokens(counters.trimmed_tokens);
  reply.set_published_pages(counters.published_pages);
  reply.set_evicted_pages(counters.evicted_pages);
  reply.set_expired_leases(counters.expired_leases);
  reply.set_promoted_copies(counters.copies);
  reply.set_spilled_copies(counters.dropped_copies);
  reply.set_pulled_bytes(metrics.pulled_bytes());
  reply.set_checksum_failures(metrics.checksum_failures());
}

void FillSession(const SessionStatus& session, v1::SessionInfo& reply) {
  reply.set_session_id(session.id.value());
  reply.set_client_name(session.client_name);
  reply.set_pid(session.pid);
  reply.set_tenant(session.tenant);
  SetDigest(session.profile_id, reply.mutable_profile_id());
  reply.set_age_seconds(absl::ToDoubleSeconds(session.age));
  reply.set_leases(session.leases);
  reply.set_publishes(session.publishes);
}

void FillNamespace(const NamespaceStatus& space, v1::NamespaceInfo& reply) {
  SetDigest(space.id, reply.mutable_namespace_id());
  reply.set_tenant(space.tenant);
  SetDigest(space.profile_id, reply.mutable_profile_id());
  reply.set_context_key(space.context_key);
  reply.set_pages(space.pages);
  reply.set_used_bytes(space.used_bytes);
  reply.set_bf16_equivalent_bytes(space.bf16_equivalent_bytes);
}

void FillNode(const TreeNodeStatus& node, v1::TreeNode& reply) {
  reply.set_id(node.id);
  reply.set_parent_id(node.parent_id);
  SetDigest(node.namespace_id, reply.mutable_namespace_id());
  reply.set_first_token(node.first_token);
  reply.set_num_tokens(node.num_tokens);
  reply.set_int2_bytes(node.int2_bytes);
  reply.set_bf16_bytes(node.bf16_bytes);
  reply.set_hits(node.hits);
  reply.set_leases(node.leases);
  reply.set_idle_seconds(absl::ToDoubleSeconds(node.idle));
  reply.set_head_tokens(node.head_tokens.data(), node.head_tokens.size() * sizeof(uint32_t));
}

}  // namespace

grpc::ServerUnaryReactor* AdminService::GetStatus(grpc::CallbackServerContext* call,
                                                  const v1::GetStatusRequest* /*request*/,
                                                  v1::GetStatusReply* reply) {
  const UnaryCall unary(context_, call, RpcMethod::kAdmin);
  const StoreStatus status = context_.store.Status();
  reply->set_version(context_.version);
  reply->set_epoch(context_.epoch);
  reply->set_uptime_seconds(absl::ToDoubleSeconds(context_.clock.Now() - context_.start_time));
  FillTotals(status, *reply);
  FillCounters(status.counters, context_.metrics, *reply->mutable_counters());
  for (const SessionStatus& session : status.sessions) {
    FillSession(session, *reply->add_sessions());
  }
  for (const NamespaceStatus& space : status.namespaces) {
    FillNamespace(space, *reply->add_namespaces());
  }
  for (const std::string& words : context_.data_planes) {
    reply->add_data_planes(words);
  }
  return unary.Finish(absl::OkStatus());
}

grpc::ServerUnaryReactor* AdminService::GetTree(grpc::CallbackServerContext* call,
                                                const v1::GetTreeRequest* request,
                                                v1::GetTreeReply* reply) {
  return UnaryCall(context_, call, RpcMethod::kAdmin).Finish(DoGetTree(*request, *reply));
}

absl::Status AdminService::DoGetTree(const v1::GetTreeRequest& request, v1::GetTreeReply& reply) {
  std::optional<NamespaceId> namespace_id;
  if (!request.namespace_id().empty()) {
    CRUMB_ASSIGN_OR_RETURN(namespace_id, ParseNamespaceId(request.namespace_id()));
  }
  if (request.max_nodes() > kMaxTreeNodes) {
    return absl::InvalidArgumentError(absl::StrCat("max_nodes is ", request.max_nodes(),
                                                   ", at most ", kMaxTreeNodes,
                                                   " are allowed: ask for one namespace"));
  }
  const uint32_t max_nodes = request.max_nodes() == 0 ? kDefaultTreeNodes : request.max_nodes();
  CRUMB_ASSIGN_OR_RETURN(const TreeStatus tree, context_.store.Tree(namespace_id, max_nodes));
  for (const TreeNodeStatus& node : tree.nodes) {
    FillNode(node, *reply.add_nodes());
  }
  reply.set_truncated(tree.truncated);
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* AdminService::Evict(grpc::CallbackServerContext* call,
                                              const v1::EvictRequest* request,
                                              v1::EvictReply* reply) {
  return UnaryCall(context_, call, RpcMethod::kAdmin).Finish(DoEvict(*request, *reply));
}

absl::Status AdminService::DoEvict(const v1::EvictRequest& request, v1::EvictReply& reply) {
  CRUMB_ASSIGN_OR_RETURN(const NamespaceId namespace_id, ParseNamespaceId(request.namespace_id()));
  CRUMB_ASSIGN_OR_RETURN(const TokenList tokens, TokenList::ParseOrEmpty(request.tokens()));
  CRUMB_ASSIGN_OR_RETURN(const EvictResult result,
                         context_.store.Evict(namespace_id, tokens.ids()));
  reply.set_evicted_pages(result.evicted_pages);
  reply.set_freed_bytes(result.freed_bytes);
  reply.set_leased_pages_kept(result.held_pages_kept);
  LogEvent(LogLevel::kInfo, "evicted_by_operator",
           {{"namespace", namespace_id.Short()},
            {"tokens", tokens.ids().size()},
            {"pages", result.evicted_pages},
            {"bytes", result.freed_bytes},
            {"kept", result.held_pages_kept}});
  return absl::OkStatus();
}

}  // namespace crumb
