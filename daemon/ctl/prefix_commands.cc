// SPDX-License-Identifier: Apache-2.0
//
// crumbctl tree, probe and evict.
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

#include "daemon/ctl/commands.h"
#include "daemon/ctl/format.h"
#include "daemon/ctl/json_reply.h"
#include "daemon/ctl/selection.h"
#include "nlohmann/json.hpp"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

// "1 2 3 4 ..." of the node's first tokens.
std::string HeadText(const v1::TreeNode& node) {
  constexpr size_t kShown = 6;
  std::string text;
  const size_t count = node.head_tokens().size() / sizeof(uint32_t);
  for (size_t i = 0; i < count && i < kShown; ++i) {
    uint32_t token = 0;
    std::memcpy(&token, node.head_tokens().data() + i * sizeof(token), sizeof(token));
    absl::StrAppend(&text, i == 0 ? "" : " ", token);
  }
  return node.num_tokens() > kShown ? text + " ..." : text;
}

std::string Title(const v1::GetStatusReply& status, const std::string& namespace_id) {
  for (const v1::NamespaceInfo& space : status.namespaces()) {
    if (space.namespace_id() == namespace_id) {
      return absl::StrCat(
          "namespace ", Hex(namespace_id, 6), ": tenant ", space.tenant(), ", profile ",
          Hex(space.profile_id(), 6),
          space.context_key().empty() ? "" : ", context " + Printable(space.context_key()));
    }
  }
  return absl::StrCat("namespace ", Hex(namespace_id, 6));
}

void PrintNodes(const v1::GetStatusReply& status, const v1::GetTreeReply& tree, std::ostream& out) {
  using Align = Table::Align;
  // One table over all namespaces, so that columns line up; titles are printed between.
  std::map<uint32_t, size_t> depths;
  std::string namespace_id;
  std::vector<std::pair<std::string, Table>> tables;
  for (const v1::TreeNode& node : tree.nodes()) {
    if (tables.empty() || node.namespace_id() != namespace_id) {
      namespace_id = node.namespace_id();
      tables.emplace_back(Title(status, namespace_id), Table({{"TOKENS", Align::kLeft},
                                                              {"COUNT"},
                                                              {"INT2"},
                                                              {"BF16"},
                                                              {"HITS"},
                                                              {"LEASES"},
                                                              {"IDLE"},
                                                              {"FIRST TOKENS", Align::kLeft}}));
    }
    const size_t depth = node.parent_id() == 0 ? 0 : depths[node.parent_id()] + 1;
    depths[node.id()] = depth;
    tables.back().second.AddRow({absl::StrCat(std::string(2 * depth, ' '), "[", node.first_token(),
                                              ", ", node.first_token() + node.num_tokens(), ")"),
                                 Count(node.num_tokens()), Bytes(node.int2_bytes()),
                                 Bytes(node.bf16_bytes()), Count(node.hits()), Count(node.leases()),
                                 Seconds(node.idle_seconds()), HeadText(node)});
  }
  for (size_t i = 0; i < tables.size(); ++i) {
    out << (i == 0 ? "" : "\n") << tables[i].first << "\n";
    tables[i].second.Print(out);
  }
}

// The id of the namespace that the options name.
absl::StatusOr<std::string> FindNamespace(AdminClient& daemon, const PrefixOptions& options) {
  CRUMB_ASSIGN_OR_RETURN(const v1::GetStatusReply status, daemon.GetStatus());
  CRUMB_ASSIGN_OR_RETURN(const v1::NamespaceInfo space,
                         SelectNamespace(status, options.namespace_prefix));
  return space.namespace_id();
}

}  // namespace

absl::Status RunTree(AdminClient& daemon,
                     const TreeOptions& options,
                     bool json,
                     std::ostream& out) {
  CRUMB_ASSIGN_OR_RETURN(const v1::GetStatusReply status, daemon.GetStatus());
  std::string namespace_id;
  if (!options.namespace_prefix.empty()) {
    CRUMB_ASSIGN_OR_RETURN(const v1::NamespaceInfo space,
                           SelectNamespace(status, options.namespace_prefix));
    namespace_id = space.namespace_id();
  }
  CRUMB_ASSIGN_OR_RETURN(const v1::GetTreeReply tree,
                         daemon.GetTree(namespace_id, options.max_nodes));
  if (json) {
    out << ToJson(tree).dump(2) << "\n";
    return absl::OkStatus();
  }
  if (tree.nodes().empty()) {
    out << "no prefixes are held\n";
    return absl::OkStatus();
  }
  PrintNodes(status, tree, out);
  if (tree.truncated()) {
    out << "\nonly the first " << Count(static_cast<uint64_t>(tree.nodes_size()))
        << " branches are shown: --max-nodes shows more, --namespace fewer\n";
  }
  return absl::OkStatus();
}

absl::Status RunProbe(AdminClient& daemon,
                      const PrefixOptions& options,
                      bool json,
                      std::ostream& out) {
  CRUMB_ASSIGN_OR_RETURN(const std::string space, FindNamespace(daemon, options));
  CRUMB_ASSIGN_OR_RETURN(const v1::ProbeReply probe, daemon.Probe(space, options.tokens));
  if (json) {
    out << ToJson(probe).dump(2) << "\n";
    return absl::OkStatus();
  }
  const uint64_t prompt = options.tokens.size();
  out << "prompt   " << Count(prompt) << " tokens\n"
      << "matched  " << Count(probe.matched_tokens()) << " ("
      << Percent(probe.matched_tokens(), prompt) << ")\n"
      << "usable   " << Count(probe.usable_tokens()) << " ("
      << Percent(probe.usable_tokens(), prompt) << ")\n"
      << "trimmed  " << Count(probe.trimmed_tokens()) << "\n";
  return absl::OkStatus();
}

absl::Status RunEvict(AdminClient& daemon,
                      const PrefixOptions& options,
                      bool json,
                      std::ostream& out) {
  CRUMB_ASSIGN_OR_RETURN(const std::string space, FindNamespace(daemon, options));
  CRUMB_ASSIGN_OR_RETURN(const v1::EvictReply evict, daemon.Evict(space, options.tokens));
  if (json) {
    out << ToJson(evict).dump(2) << "\n";
    return absl::OkStatus();
  }
  out << Count(evict.evicted_pages()) << " pages evicted, " << Bytes(evict.freed_bytes())
      << " freed\n";
  if (evict.leased_pages_kept() > 0) {
    out << Count(evict.leased_pages_kept())
        << " pages are kept, since they are leased or being written: evict again later\n";
  }
  return absl::OkStatus();
}

}  // namespace crumb
