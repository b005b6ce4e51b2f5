// SPDX-License-Identifier: Apache-2.0
//
// crumbctl's connection to a daemon: the calls it needs, as values and statuses.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "proto/crumb/v1/admin.pb.h"
#include "proto/crumb/v1/cache.pb.h"

namespace crumb {

// Thread-safe. Every call blocks for at most the timeout. UNAVAILABLE, with the address and what to
// do: no daemon answers there.
class AdminClient {
 public:
  // "unix:/path/to.sock" or "host:port". Does not connect yet.
  AdminClient(std::string address, absl::Duration timeout);
  ~AdminClient();
  AdminClient(const AdminClient&) = delete;
  AdminClient& operator=(const AdminClient&) = delete;

  const std::string& address() const { return address_; }

  absl::StatusOr<v1::GetStatusReply> GetStatus();
  // namespace_id: 32 bytes; empty: all.
  absl::StatusOr<v1::GetTreeReply> GetTree(const std::string& namespace_id, uint32_t max_nodes);
  absl::StatusOr<v1::ProbeReply> Probe(const std::string& namespace_id,
                                       std::span<const uint32_t> tokens);
  absl::StatusOr<v1::EvictReply> Evict(const std::string& namespace_id,
                                       std::span<const uint32_t> tokens);

 private:
  struct Stubs;

  const std::string address_;
  const absl::Duration timeout_;
  std::unique_ptr<Stubs> stubs_;
};

}  // namespace crumb
