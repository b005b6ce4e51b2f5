// SPDX-License-Identifier: Apache-2.0
#include "daemon/ctl/json_reply.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "daemon/ctl/format.h"
#include "nlohmann/json.hpp"

namespace crumb {
namespace {

using Json = nlohmann::ordered_json;

Json SessionJson(const v1::SessionInfo& session) {
  return {{"session_id", session.session_id()},
          {"client_name", session.client_name()},
          {"pid", session.pid()},
          {"tenant", session.tenant()},
          {"profile_id", Hex(session.profile_id())},
          {"age_seconds", session.age_seconds()},
          {"leases", session.leases()},
          {"publishes", session.publishes()}};
}

Json NamespaceJson(const v1::NamespaceInfo& space) {
  return {{"namespace_id", Hex(space.namespace_id())},
          {"tenant", space.tenant()},
          {"profile_id", Hex(space.profile_id())},
          {"context_key", space.context_key()},
          {"pages", space.pages()},
          {"used_bytes", space.used_bytes()},
          {"bf16_equivalent_bytes", space.bf16_equivalent_bytes()}};
}

Json NodeJson(const v1::TreeNode& node) {
  std::vector<uint32_t> head_tokens(node.head_tokens().size() / sizeof(uint32_t));
  std::memcpy(head_tokens.data(), node.head_tokens().data(), head_tokens.size() * sizeof(uint32_t));
  return {{"id", node.id()},
          {"parent_id", node.parent_id()},
          {"namespace_id", Hex(node.namespace_id())},
          {"first_token", node.first_token()},
          {"num_tokens", node.num_tokens()},
          {"int2_bytes", node.int2_bytes()},
          {"bf16_bytes", node.bf16_bytes()},
          {"hits", node.hits()},
          {"leases", node.leases()},
          {"idle_seconds", node.idle_seconds()},
          {"head_tokens", head_tokens}};
}

}  // namespace

Json ToJson(const v1::Counters& counters) {
  return {{"lookups", counters.lookups()},
          {"lookup_tokens", counters.lookup_tokens()},
          {"hit_tokens", counters.hit_tokens()},
          {"usable_tokens", counters.usable_tokens()},
          {"trimmed_tokens", counters.trimmed_tokens()},
          {"published_pages", counters.published_pages()},
          {"evicted_pages", counters.evicted_pages()},
          {"expired_leases", counters.expired_leases()},
          {"pulled_bytes", counters.pulled_bytes()},
          {"checksum_failures", counters.checksum_failures()},
          {"promoted_copies", counters.promoted_copies()},
          {"spilled_copies", counters.spilled_copies()}};
}

Json ToJson(const v1::GetStatusReply& status) {
  Json json = {{"version", status.version()},
               {"epoch", status.epoch()},
               {"uptime_seconds", status.uptime_seconds()},
               {"draining", status.draining()},
               {"capacity_bytes", status.capacity_bytes()},
               {"chunk_bytes", status.chunk_bytes()},
               {"used_bytes", status.used_bytes()},
               {"int2_pages", status.int2_pages()},
               {"bf16_pages", status.bf16_pages()},
               {"leases", status.leases()},
               {"leased_pages", status.leased_pages()},
               {"publishes", status.publishes()},
               {"quarantined_bytes", status.quarantined_bytes()},
               {"gpu_capacity_bytes", status.gpu_capacity_bytes()},
               {"gpu_used_bytes", status.gpu_used_bytes()},
               {"gpu_copies", status.gpu_copies()},
               {"sessions", Json::array()},
               {"namespaces", Json::array()},
               {"counters", ToJson(status.counters())},
               {"data_planes", Json::array()}};
  for (const v1::SessionInfo& session : status.sessions()) {
    json["sessions"].push_back(SessionJson(session));
  }
  for (const v1::NamespaceInfo& space : status.namespaces()) {
    json["namespaces"].push_back(NamespaceJson(space));
  }
  for (const std::string& words : status.data_planes()) {
    json["data_planes"].push_back(words);
  }
  return json;
}

Json ToJson(const v1::GetTreeReply& tree) {
  Json json = {{"nodes", Json::array()}, {"truncated", tree.truncated()}};
  for (const v1::TreeNode& node : tree.nodes()) {
    json["nodes"].push_back(NodeJson(node));
  }
  return json;
}

Json ToJson(const v1::ProbeReply& probe) {
  return {{"matched_tokens", probe.matched_tokens()},
          {"usable_tokens", probe.usable_tokens()},
          {"trimmed_tokens", probe.trimmed_tokens()}};
}

Json ToJson(const v1::EvictReply& evict) {
  return {{"evicted_pages", evict.evicted_pages()},
          {"freed_bytes", evict.freed_bytes()},
          {"leased_pages_kept", evict.leased_pages_kept()}};
}

}  // namespace crumb
