// SPDX-License-Identifier: Apache-2.0
//
// What the server and the control plane know of a data plane: one way in which page bytes leave and
// enter the daemon.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "daemon/transfer/staging_memory.h"
#include "proto/base/ids.h"

namespace crumb {

// Made serving by its class's Create; Thread-safe.
class DataPlaneServer {
 public:
  virtual ~DataPlaneServer() = default;

  // For `crumbctl status` and the log, in words: "memory map, by the socket /run/crumb/...".
  virtual std::string Description() const = 0;
  // Refuses what is new, waits for what is under way within a bound of its own, and joins its
  // threads. Idempotent, not to be called by two threads at once; the destructor calls it.
  virtual void Stop() = 0;
};

// Where engines find the UCX data plane; see UcxAddress in cache.proto.
struct UcxEndpoint {
  std::string host;
  uint16_t port = 0;
  std::string version;
};

// A data plane with which pages are pulled, and pushed into private memory of the daemon.
class UcxDataPlane : public DataPlaneServer {
 public:
  virtual UcxEndpoint endpoint() const = 0;
  // The memory that a publish was sent to, for its commit. It stays there for another attempt until
  // DropStaging, and is valid beyond that for who holds it.
  // FAILED_PRECONDITION: nothing was sent, or bytes are missing. Any thread; does not block.
  // shared: see StagingMemory.
  virtual absl::StatusOr<std::shared_ptr<const StagingMemory>> Staging(SessionId session,
                                                                       PublishId publish) = 0;
  // Drops what a session, or one publish of it, has sent: its end, or the publish's. Any thread;
  // does not block.
  virtual void DropStaging(SessionId session) = 0;
  virtual void DropStaging(SessionId session, PublishId publish) = 0;
};

// Told of every transfer that ended well. Thread-safe, does not block.
class TransferObserver {
 public:
  virtual ~TransferObserver() = default;
  virtual void OnPulled(uint64_t bytes, absl::Duration duration) = 0;  // To an engine.
  virtual void OnPushed(uint64_t bytes, absl::Duration duration) = 0;  // From an engine.
};

}  // namespace crumb
