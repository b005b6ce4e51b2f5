// SPDX-License-Identifier: Apache-2.0
//
// The attached engines as the control plane knows them. Begins and ends a session everywhere at
// once: in the store, on the data plane's sockets, and here.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

#include "crumb/cuda/profile.h"
#include "daemon/rpc/request.h"
#include "daemon/store/page_store.h"
#include "daemon/transfer/data_plane.h"
#include "daemon/transfer/session_table.h"

namespace crumb {

struct AttachedEngine {
  SessionId id;
  SessionSecret secret{};
  AttachSpec spec;
  HeadRange heads;                         // count is never 0 here.
  std::shared_ptr<const Profile> profile;  // shared: with the registry of profiles.
  bool reads_gpu_pages = false;
  std::string gpu_note;  // Why it does not, if it named a GPU.
};

// The GPU in whose memory the daemon keeps copies of pages.
struct GpuOffer {
  std::optional<GpuUuid> gpu;  // None: there are no copies.
  std::string note;            // Why.
};

// Thread-safe.
class SessionRegistry {
 public:
  // `ucx` may be null. All outlive this.
  SessionRegistry(PageStore& store, SessionTable& table, UcxDataPlane* ucx, GpuOffer gpu = {})
      : store_(store), table_(table), ucx_(ucx), gpu_(std::move(gpu)) {}

  // shared: with commits that go on when the session ends.
  //
  // INVALID_ARGUMENT: heads beyond the profile's. Otherwise as PageStore::OpenSession.
  absl::StatusOr<std::shared_ptr<const AttachedEngine>> Attach(
      const AttachSpec& spec, std::shared_ptr<const Profile> profile);
  // Ends all that the session owns. No-op for one that has ended.
  void Detach(SessionId session);

  // FAILED_PRECONDITION: not attached (any more).
  absl::StatusOr<std::shared_ptr<const AttachedEngine>> Find(SessionId session) const;

 private:
  PageStore& store_;
  SessionTable& table_;
  UcxDataPlane* const ucx_;
  const GpuOffer gpu_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<SessionId, std::shared_ptr<const AttachedEngine>> sessions_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb
