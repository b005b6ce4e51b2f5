// SPDX-License-Identifier: Apache-2.0
//
// The control plane's listener: services Cache and Admin, health checking and reflection, over a
// Unix socket and, if asked for, TCP. Keeps gRPC out of the headers of the rest.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "daemon/rpc/rpc_context.h"

namespace crumb {

struct GrpcOptions {
  std::string unix_socket;
  uint32_t unix_socket_mode = 0660;
  std::string tcp;  // "host:port", port 0 for any; empty: none. Clear text.
};

// Thread-safe.
class GrpcServer {
 public:
  // Serves on return. UNAVAILABLE names the address that cannot be listened on. The Unix socket's
  // file must be gone, or is replaced: the caller knows that no one listens there. `context`
  // outlives this. Not from several threads at a time: sets the process's umask for the socket.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Create(const GrpcOptions& options,
                                                            RpcContext& context);
  // Calls Shutdown if it was not.
  ~GrpcServer();
  GrpcServer(const GrpcServer&) = delete;
  GrpcServer& operator=(const GrpcServer&) = delete;

  uint16_t tcp_port() const;  // 0 without TCP.

  // Health turns to NOT_SERVING, and every session is told.
  void SetDraining();
  // Refuses new calls, waits for those under way until `grace` is over, then cancels them. All
  // sessions end. The demotion pool must run or be stopped by someone else meanwhile: commits that
  // it holds are calls under way.
  void Shutdown(absl::Duration grace);

 private:
  class Impl;
  explicit GrpcServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace crumb
