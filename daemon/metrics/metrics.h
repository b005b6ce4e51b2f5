// SPDX-License-Identifier: Apache-2.0
//
// What the daemon tells Prometheus; docs/metrics.md lists every name with its unit. What the store
// counts is read from it at each scrape, as one consistent picture, so a ratio of two counters is
// never torn. What happens elsewhere is recorded here when it happens.
//
// Label values are from closed sets: no client can make a new series.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "daemon/store/page_store.h"
#include "daemon/transfer/data_plane.h"
#include "daemon/transfer/session_table.h"

namespace crumb {

// The calls of the control plane that are counted.
enum class RpcMethod {
  kLookup,
  kProbe,
  kBeginPublish,
  kWritePages,
  kCommitPublish,
  kAbortPublish,
  kRenewLeases,
  kReleaseLeases,
  kAttach,
  kAdmin,  // All calls of the Admin service.
};
inline constexpr size_t kNumRpcMethods = 10;

// What became of a published page.
enum class PageWork { kCopied, kDemotedOnCpu, kDemotedOnGpu };
inline constexpr size_t kNumPageWorks = 3;

// Thread-safe; recording holds a lock for some additions at most.
class Metrics : public TransferObserver {
 public:
  // Both outlive this.
  Metrics(const PageStore& store, const SessionTable& sessions, const std::string& version);
  ~Metrics() override;
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Serves /metrics at "host:port" (port 0: any) until destroyed. Returns the port. UNAVAILABLE,
  // naming the address: it cannot be bound. Once.
  absl::StatusOr<uint16_t> Listen(const std::string& address);

  void OnRpc(RpcMethod method, absl::StatusCode code, absl::Duration duration);
  // One published page was checked and written.
  void OnPageWritten(PageWork work, absl::Duration duration);
  // The CPU demoted a page since the GPU could not. How many those are, with this one.
  uint64_t OnGpuDemotionFailure();
  void OnChecksumFailure();
  void OnPulled(uint64_t bytes, absl::Duration duration) override;
  void OnPushed(uint64_t bytes, absl::Duration duration) override;

  uint64_t pulled_bytes() const;
  uint64_t checksum_failures() const;

  // What a scrape gets, in Prometheus' text format.
  std::string Text() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace crumb
