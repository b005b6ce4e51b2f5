// SPDX-License-Identifier: Apache-2.0
#include "daemon/rpc/session_registry.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "proto/base/status_macros.h"

// shared: the header says by whom.

namespace crumb {

absl::StatusOr<std::shared_ptr<const AttachedEngine>> SessionRegistry::Attach(
    const AttachSpec& spec, std::shared_ptr<const Profile> profile) {
  const uint32_t num_kv_heads = profile->geometry().num_kv_heads;
  const HeadRange heads = spec.heads.Resolve(num_kv_heads);
  if (!heads.IsWithin(num_kv_heads)) {
    return absl::InvalidArgumentError(
        absl::StrCat("heads [", heads.first, ", +", heads.count, ") are not within the profile's ",
                     num_kv_heads, " KV heads: give the rank's own, or another profile"));
  }
  const bool reads_gpu_pages = spec.gpu.has_value() && spec.gpu == gpu_.gpu;
  std::string gpu_note;
  if (spec.gpu.has_value() && !reads_gpu_pages) {
    gpu_note = gpu_.gpu.has_value() ? "the daemon keeps pages in another GPU's memory" : gpu_.note;
  }
  CRUMB_ASSIGN_OR_RETURN(
      const SessionId id,
      store_.OpenSession({.client_name = spec.client_name,
                          .pid = spec.pid,
                          .tenant = spec.tenant,
                          .profile = {profile->id(), profile->geometry(), profile->windows()},
                          .heads = heads,
                          .reads_copies = reads_gpu_pages}));
  auto session =
      std::make_shared<const AttachedEngine>(AttachedEngine{.id = id,
                                                            .secret = MakeSessionSecret(),
                                                            .spec = spec,
                                                            .heads = heads,
                                                            .profile = std::move(profile),
                                                            .reads_gpu_pages = reads_gpu_pages,
                                                            .gpu_note = std::move(gpu_note)});
  table_.Add(id, session->secret);
  absl::MutexLock lock(&mutex_);
  sessions_.emplace(id, session);
  return session;
}

void SessionRegistry::Detach(SessionId session) {
  {
    absl::MutexLock lock(&mutex_);
    if (sessions_.erase(session) == 0) {
      return;
    }
  }
  table_.Remove(session);
  if (ucx_ != nullptr) {
    ucx_->DropStaging(session);
  }
  store_.EndSession(session);
}

absl::StatusOr<std::shared_ptr<const AttachedEngine>> SessionRegistry::Find(
    SessionId session) const {
  absl::MutexLock lock(&mutex_);
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) {
    return absl::FailedPreconditionError(
        absl::StrCat("session ", session.value(),
                     " is not attached (it ended, or is of another start of the daemon): attach"));
  }
  return found->second;
}

}  // namespace crumb
