// SPDX-License-Identifier: Apache-2.0
//
// The daemon: everything of it, made in order, and taken down in order. A program may hold several
// (tests do), each with its own socket.
//
// Threads: gRPC's own; the demotion pool; the memory socket's; UCX's, if enabled; Prometheus'; and
// the maintenance thread here, which calls PageStore::Tick.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "daemon/demote/demote_pool.h"
#include "daemon/server/config.h"
#include "daemon/store/page_store.h"
#include "proto/base/clock.h"

namespace crumb {

// Thread-safe but for Drain.
class Server {
 public:
  // Serves on return. INVALID_ARGUMENT: the configuration. FAILED_PRECONDITION, UNAVAILABLE: a
  // socket or port that cannot be had; names it and the remedy. `clock` outlives this.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const Config& config, const Clock& clock);
  // As Drain, with no time for anyone.
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Takes no new work, tells the sessions, waits for unfinished publishes at most
  // config.drain_timeout, and stops all. Sockets are gone on return. Once.
  void Drain();

  const Config& config() const;
  uint16_t tcp_port() const;      // 0: no TCP.
  uint16_t metrics_port() const;  // 0: no metrics.
  // In words: which data planes are offered, and why others are not.
  const std::vector<std::string>& data_planes() const;
  PageStore& store();
  DemotePool& demote_pool();

 private:
  class Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace crumb
