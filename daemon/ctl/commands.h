// SPDX-License-Identifier: Apache-2.0
//
// crumbctl's commands. Each asks the daemon and prints to `out`: tables for people, or one JSON
// value for programs. docs/metrics.md and admin.proto say what the figures mean.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "daemon/ctl/admin_client.h"

namespace crumb {

absl::Status RunStatus(AdminClient& daemon, bool json, std::ostream& out);

struct TreeOptions {
  std::string namespace_prefix;  // First digits of a namespace's id; empty: all.
  uint32_t max_nodes = 1000;
};
absl::Status RunTree(AdminClient& daemon, const TreeOptions& options, bool json, std::ostream& out);

struct PrefixOptions {
  std::string namespace_prefix;  // Empty: the only one.
  std::vector<uint32_t> tokens;  // Evict: empty for the whole namespace.
};
absl::Status RunProbe(AdminClient& daemon,
                      const PrefixOptions& options,
                      bool json,
                      std::ostream& out);
absl::Status RunEvict(AdminClient& daemon,
                      const PrefixOptions& options,
                      bool json,
                      std::ostream& out);

struct TopOptions {
  absl::Duration interval = absl::Seconds(1);
  uint32_t num_samples = 0;  // 0: until q, Ctrl-C or the end of the daemon.
};
// A live view on a terminal; elsewhere, and as JSON, a line a sample.
absl::Status RunTop(AdminClient& daemon, const TopOptions& options, bool json, std::ostream& out);

// The whole program but for the process: parses `argv`, runs, and returns the exit status (0, 1 if
// the command failed, 2 for wrong arguments). Messages go to `err`.
int RunCrumbctl(int argc, const char* const* argv, std::ostream& out, std::ostream& err);

}  // namespace crumb
