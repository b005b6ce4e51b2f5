// SPDX-License-Identifier: Apache-2.0
//
// What UCX needs before it can send a byte: settings, context, worker, addresses; and the one place
// where its status codes become absl::Status. Internal to client/transport. Thread-compatible.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <ucp/api/ucp.h>

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "client/transport/ucx_worker.h"

namespace crumb {

// OK for UCS_OK; otherwise "UCX: <what>: <UCX's words>" under the code that callers act on.
absl::Status UcxStatus(ucs_status_t status, std::string_view what);

// A context with active messages and wake-up only, and one worker for one thread.
class UcxContext {
 public:
  static absl::StatusOr<UcxContext> Open(const UcxOptions& options);
  UcxContext(UcxContext&& other) noexcept;
  UcxContext& operator=(UcxContext&&) = delete;
  UcxContext(const UcxContext&) = delete;
  UcxContext& operator=(const UcxContext&) = delete;
  // The worker must have been flushed: UCX aborts otherwise.
  ~UcxContext();
  // Leaves both to the end of the process.
  void Leak();

  ucp_worker_h worker() const { return worker_; }
  int event_fd() const { return event_fd_; }  // Readable when an armed worker has work.

 private:
  UcxContext() = default;

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int event_fd_ = -1;
};

// An IPv4 or IPv6 address in digits, with its port.
class SocketAddress {
 public:
  static absl::StatusOr<SocketAddress> Parse(const std::string& host, uint16_t port);
  // The port in an address that UCX reports.
  static uint16_t PortOf(const sockaddr_storage& address);

  ucs_sock_addr_t ucs() const { return {reinterpret_cast<const sockaddr*>(&storage_), length_}; }

 private:
  sockaddr_storage storage_{};
  socklen_t length_ = 0;
};

}  // namespace crumb
