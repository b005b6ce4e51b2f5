// SPDX-License-Identifier: Apache-2.0
//
// The calls of proto/crumb/v1/cache.proto in plain structs: the only place of the library that
// knows gRPC. One object is one channel to one daemon and at most one session on it.
//
// Errors are the daemon's, as it said them; UNAVAILABLE when it cannot be reached or went away;
// DEADLINE_EXCEEDED when it does not answer in time, naming the call and the address. Deadlines are
// of Clock::System().
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "client/transport/page_source.h"
#include "crumb/cuda/shared_memory.h"
#include "proto/base/ids.h"

namespace crumb {

// What the daemon answered to Attach.
struct AttachedSession {
  SessionInfo info;  // Complete.
  absl::Duration lease;
  std::string daemon_version;
  bool draining = false;
};

struct AttachParams {
  std::string client_name;
  std::string tenant;
  std::shared_ptr<const Profile> profile;  // shared: with the engine.
  HeadRange heads;                         // count is never 0.
  int gpu = -1;                            // On which it reads pages; -1: on none.
  GpuUuid gpu_uuid{};                      // Of that.
};

struct FoundPrefix {
  uint32_t matched_tokens = 0;
  uint32_t usable_tokens = 0;
  uint32_t trimmed_tokens = 0;
  LeaseId lease;             // 0: no pages.
  absl::Duration lease_for;  // From the moment the request was sent.
  std::vector<PagePlaces> pages;
};

struct LookupParams {
  std::string context_key;
  std::span<const uint32_t> tokens;
  bool allow_int2_window = false;
};

struct MissingPages {
  PublishId publish;
  std::vector<PageIdx> int2;  // Ascending.
  std::vector<PageIdx> bf16;  // Ascending.
};

struct StagedImage {
  PageIdx page;
  PageEncoding encoding = PageEncoding::kInt2;
  uint64_t offset = 0;
  std::vector<uint32_t> head_crc32c;
};

// Staged pages of a publish: for StartWrite, or the last ones for CommitPublish.
struct CommitParams {
  PublishId publish;
  std::vector<StagedImage> staged;  // Ascending by page and encoding.
  bool over_ucx = false;
};

struct CommitCounts {
  uint32_t pages_added = 0;
  uint32_t pages_present = 0;
};

struct RenewedLeases {
  absl::Duration lease_for;    // From the moment the request was sent.
  std::vector<LeaseId> ended;  // Of those asked for.
};

// Thread-safe, but for Attach and WaitForNews: one thread. All calls after them are of the session
// that Attach opened, and prove it: they may begin once it has returned.
class ControlPlane {
 public:
  // "unix:/path" or "host:port". Never fails: calls say that no one can be reached.
  static std::unique_ptr<ControlPlane> Create(const std::string& address);
  virtual ~ControlPlane() = default;

  // Opens the session; sends the profile's file if the daemon does not know the id. Blocks until
  // the daemon answers, however long, or Cancel. At most once.
  virtual absl::StatusOr<AttachedSession> Attach(const AttachParams& params) = 0;
  // Blocks until the daemon says more: OK when it is draining; an error when the session has ended.
  virtual absl::Status WaitForNews() = 0;
  // Ends the session and all calls, also those to come: they return CANCELLED. Any thread.
  virtual void Cancel() = 0;

  virtual absl::StatusOr<FoundPrefix> Lookup(const LookupParams& params, absl::Time deadline) = 0;
  virtual absl::StatusOr<MissingPages> BeginPublish(const std::string& context_key,
                                                    std::span<const uint32_t> tokens,
                                                    absl::Time deadline) = 0;
  // Has the daemon write pages while the caller stages others. `done` is called once, by any
  // thread, perhaps before this returns, and little after the deadline at the latest. An answer,
  // whatever it is, means that the staging memory of these pages is free; so none that comes from
  // here means nothing: DEADLINE_EXCEEDED, UNAVAILABLE, CANCELLED.
  virtual void StartWrite(const CommitParams& params,
                          absl::Time deadline,
                          std::function<void(const absl::Status&)> done) = 0;
  virtual absl::StatusOr<CommitCounts> CommitPublish(const CommitParams& params,
                                                     absl::Time deadline) = 0;
  virtual absl::Status AbortPublish(PublishId publish, absl::Time deadline) = 0;
  virtual absl::StatusOr<RenewedLeases> RenewLeases(std::span<const LeaseId> leases,
                                                    absl::Time deadline) = 0;
  virtual absl::Status ReleaseLeases(std::span<const LeaseId> leases, absl::Time deadline) = 0;
};

}  // namespace crumb
