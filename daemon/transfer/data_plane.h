// SPDX-License-Identifier: Apache-2.0
//
// One way in which page bytes leave and enter the daemon, as the server starts, names and stops it.
#pragma once

#include <cstdint>
#include <string>

namespace crumb {

// Where engines find a UCX data plane; see UcxAddress in cache.proto.
struct UcxEndpoint {
  std::string host;
  uint16_t port = 0;
  std::string version;
};

// Made serving by its class's Create; Thread-safe.
class DataPlaneServer {
 public:
  virtual ~DataPlaneServer() = default;

  // For `crumbctl status` and the log, in words: "memory map by /run/crumb/crumbd.sock.mem".
  virtual std::string Description() const = 0;
  // Refuses what is new, waits for what is under way within a bound of its own, and joins its
  // threads. Idempotent; the destructor calls it.
  virtual void Stop() = 0;
};

}  // namespace crumb
