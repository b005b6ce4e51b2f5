// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "absl/strings/str_cat.h"

#include "daemon/ctl/commands.h"
#include "daemon/ctl/format.h"
#include "daemon/ctl/json_reply.h"
#include "nlohmann/json.hpp"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

void PrintTotals(const v1::GetStatusReply& status, std::ostream& out) {
  const v1::Counters& counters = status.counters();
  out << "crumbd " << status.version() << ", " << (status.draining() ? "draining" : "serving")
      << ", up " << Seconds(status.uptime_seconds()) << ", epoch " << status.epoch() << "\n\n"
      << "memory     " << Bytes(status.used_bytes()) << " used of "
      << Bytes(status.capacity_bytes()) << " ("
      << Percent(status.used_bytes(), status.capacity_bytes()) << "), "
      << Bytes(status.chunk_bytes()) << " held in chunks, " << Bytes(status.quarantined_bytes())
      << " in quarantine\n";
  if (status.gpu_capacity_bytes() > 0) {
    out << "on the GPU " << Bytes(status.gpu_used_bytes()) << " used of "
        << Bytes(status.gpu_capacity_bytes()) << ", " << Count(status.gpu_copies()) << " copies; "
        << Count(counters.promoted_copies()) << " made, " << Count(counters.spilled_copies())
        << " dropped so far\n";
  }
  out << "pages      " << Count(status.int2_pages()) << " in INT2, " << Count(status.bf16_pages())
      << " in BF16\n"
      << "leases     " << Count(status.leases()) << " on " << Count(status.leased_pages())
      << " pages; " << Count(counters.expired_leases()) << " ran out so far\n"
      << "publishes  " << Count(status.publishes()) << " unfinished; "
      << Count(counters.published_pages()) << " pages published, "
      << Count(counters.evicted_pages()) << " evicted so far\n"
      << "lookups    " << Count(counters.lookups()) << " of " << Count(counters.lookup_tokens())
      << " tokens: " << Percent(counters.hit_tokens(), counters.lookup_tokens()) << " matched, "
      << Percent(counters.usable_tokens(), counters.lookup_tokens()) << " usable, "
      << Percent(counters.trimmed_tokens(), counters.lookup_tokens())
      << " given up to the recent window\n"
      << "transfers  " << Bytes(counters.pulled_bytes()) << " pulled over UCX, "
      << Count(counters.checksum_failures()) << " checksum failures\n";
  for (const std::string& words : status.data_planes()) {
    out << "data plane " << words << "\n";
  }
}

void PrintNamespaces(const v1::GetStatusReply& status, std::ostream& out) {
  using Align = Table::Align;
  Table table({{"NAMESPACE", Align::kLeft},
               {"TENANT", Align::kLeft},
               {"PROFILE", Align::kLeft},
               {"CONTEXT", Align::kLeft},
               {"PAGES"},
               {"BYTES"},
               {"IN BF16"},
               {"SAVED"}});
  for (const v1::NamespaceInfo& space : status.namespaces()) {
    table.AddRow({Hex(space.namespace_id(), 6), space.tenant(), Hex(space.profile_id(), 6),
                  space.context_key().empty() ? "-" : space.context_key(), Count(space.pages()),
                  Bytes(space.used_bytes()), Bytes(space.bf16_equivalent_bytes()),
                  Ratio(space.bf16_equivalent_bytes(), space.used_bytes())});
  }
  out << "\n";
  table.Print(out);
}

void PrintSessions(const v1::GetStatusReply& status, std::ostream& out) {
  using Align = Table::Align;
  Table table({{"SESSION"},
               {"CLIENT", Align::kLeft},
               {"PID"},
               {"TENANT", Align::kLeft},
               {"PROFILE", Align::kLeft},
               {"AGE"},
               {"LEASES"},
               {"PUBLISHES"}});
  for (const v1::SessionInfo& session : status.sessions()) {
    table.AddRow({std::to_string(session.session_id()), session.client_name(),
                  std::to_string(session.pid()), session.tenant(), Hex(session.profile_id(), 6),
                  Seconds(session.age_seconds()), Count(session.leases()),
                  Count(session.publishes())});
  }
  out << "\n";
  table.Print(out);
}

}  // namespace

absl::Status RunStatus(AdminClient& daemon, bool json, std::ostream& out) {
  CRUMB_ASSIGN_OR_RETURN(const v1::GetStatusReply status, daemon.GetStatus());
  if (json) {
    out << ToJson(status).dump(2) << "\n";
    return absl::OkStatus();
  }
  PrintTotals(status, out);
  if (status.namespaces_size() > 0) {
    PrintNamespaces(status, out);
  }
  if (status.sessions_size() > 0) {
    PrintSessions(status, out);
  }
  return absl::OkStatus();
}

}  // namespace crumb
