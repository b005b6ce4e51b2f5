// SPDX-License-Identifier: Apache-2.0
//
// A transfer_daemon as another process, and what its answers mean to an engine. For tests and
// benchmarks of the UCX data plane. Thread-compatible. Checks, and ends the program, where it
// fails.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "client/transport/page_source.h"
#include "proto/page/namespace_id.h"

namespace crumb::testing {

// What the answers of transfer_daemon to `session` and `lookup` mean to an engine.
SessionInfo ParseSession(const std::string& answer,
                         uint16_t port,
                         const std::string& version,
                         std::shared_ptr<const Profile> profile);
LeasedPrefix ParseLookup(const std::string& answer, const SessionInfo& session);

// How many head blocks of the session's heads in `source` differ from what FillBlock makes of them.
size_t CountWrongBlocks(const PageSource& source,
                        const SessionInfo& session,
                        const LeasedPrefix& prefix,
                        uint32_t salt);

class TransferProcess {
 public:
  // `arguments` are name=value, as in transfer_daemon.cc; the geometry must be given by name. The
  // program is build/<preset>/bin/transfer_daemon, beside the caller's build.
  explicit TransferProcess(std::vector<std::string> arguments);
  // Kills it, if it still runs.
  ~TransferProcess();
  TransferProcess(const TransferProcess&) = delete;
  TransferProcess& operator=(const TransferProcess&) = delete;

  // One command, one answer.
  std::string Ask(const std::string& command);
  // For the profile that the daemon was started with.
  SessionInfo OpenSession(std::shared_ptr<const Profile> profile);
  LeasedPrefix Lookup(const SessionInfo& session, uint32_t salt, uint32_t pages);

  struct Stats {
    uint64_t pulls = 0;
    uint64_t peers = 0;
    uint64_t refused = 0;
    uint64_t held_pages = 0;
    uint64_t staging_bytes = 0;
    uint64_t sent_bytes = 0;
    uint64_t pulled = 0;  // Pulls and pushes that ended well.
    uint64_t pushed = 0;
  };
  Stats GetStats();

  // SIGSTOP, after which it has stopped, SIGCONT, SIGKILL.
  void Signal(int signal) const;
  bool IsRunning() const;
  uint16_t port() const { return port_; }
  const std::string& version() const { return version_; }
  pid_t pid() const { return pid_; }
  double CpuSeconds() const;  // Used so far, of all its threads.

 private:
  pid_t pid_ = 0;
  std::FILE* commands_ = nullptr;
  std::FILE* answers_ = nullptr;
  uint16_t port_ = 0;
  std::string version_;
};

}  // namespace crumb::testing
