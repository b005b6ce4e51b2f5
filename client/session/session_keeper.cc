// SPDX-License-Identifier: Apache-2.0
#include "client/session/session_keeper.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"

#include "proto/base/status_macros.h"

namespace crumb {
namespace {

constexpr absl::Duration kBackoffMin = absl::Milliseconds(50);
// To open a data plane once the session is there; also bounds how long one can stay unused.
constexpr absl::Duration kDataPlaneTimeout = absl::Seconds(5);
// For which an attach waits so that the lookups after it need not.
constexpr absl::Duration kMapAheadTime = absl::Milliseconds(100);
// Of a lease, after which it is renewed: two more attempts fit before it is over.
constexpr int kRenewalsPerLease = 3;

// Trying again with the same options cannot mend these.
bool IsPermanent(absl::StatusCode code) {
  return code == absl::StatusCode::kInvalidArgument ||
         code == absl::StatusCode::kFailedPrecondition ||
         code == absl::StatusCode::kPermissionDenied ||
         code == absl::StatusCode::kUnauthenticated || code == absl::StatusCode::kUnimplemented;
}

}  // namespace

SessionKeeper::SessionKeeper(ClientOptions options, const GpuUuid& gpu_uuid, const Clock& clock)
    : options_(std::move(options)), gpu_uuid_(gpu_uuid), clock_(clock) {
  state_.last_error =
      absl::UnavailableError(absl::StrCat("crumbd ", options_.address, " has not answered yet"));
  attach_thread_ = std::thread([this] { AttachMain(); });
  lease_thread_ = std::thread([this] { LeaseMain(); });
}

SessionKeeper::~SessionKeeper() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    if (control_ != nullptr) {
      control_->Cancel();
    }
    if (session_ != nullptr) {
      session_->End(absl::CancelledError("the client was destroyed"));
    }
  }
  attach_thread_.join();
  lease_thread_.join();
}

absl::Status SessionKeeper::WaitAttached(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  const auto is_decided = [this] {
    mutex_.AssertReaderHeld();
    return state_.attached || IsPermanent(state_.last_error.code());
  };
  mutex_.AwaitWithTimeout(absl::Condition(&is_decided), timeout);
  return state_.attached ? absl::OkStatus() : state_.last_error;
}

ClientState SessionKeeper::state() const {
  absl::MutexLock lock(&mutex_);
  return state_;
}

void SessionKeeper::AttachMain() {
  absl::Duration backoff = kBackoffMin;
  for (;;) {
    const absl::Time began = clock_.Now();
    const absl::Status reason = RunSession();
    {
      absl::MutexLock lock(&mutex_);
      state_.attached = false;
      state_.data_plane = DataPlane::kAuto;
      state_.reads_gpu_pages = false;
      state_.draining = false;
      state_.session_id = 0;
      state_.last_error = reason;
      control_ = nullptr;
      if (session_ != nullptr) {
        session_->End(reason);
        last_session_ = std::exchange(session_, nullptr);
      }
      if (stopping_) {
        return;
      }
    }
    // One that lasted ended for another reason than the last attempts failed.
    if (clock_.Now() - began > options_.reconnect_backoff_max) {
      backoff = kBackoffMin;
    }
    Pause(backoff);
    backoff = std::min(2 * backoff, options_.reconnect_backoff_max);
  }
}

void SessionKeeper::Pause(absl::Duration backoff) {
  // Spread, so that the engines of a node do not all come back in the same moment.
  static thread_local std::minstd_rand random(std::random_device{}());
  const double factor = std::uniform_real_distribution<double>(0.5, 1.0)(random);
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithTimeout(absl::Condition(&stopping_), factor * backoff);
}

absl::Status SessionKeeper::RunSession() {
  // shared: with calls that are under way when the session ends.
  const std::shared_ptr<ControlPlane> control = ControlPlane::Create(options_.address);
  {
    absl::MutexLock lock(&mutex_);
    if (stopping_) {
      return absl::CancelledError("the client is being destroyed");
    }
    control_ = control;
  }
  CRUMB_ASSIGN_OR_RETURN(AttachedSession attached,
                         control->Attach({.client_name = options_.client_name,
                                          .tenant = options_.tenant,
                                          .profile = options_.profile,
                                          .heads = options_.heads,
                                          .gpu = options_.gpu,
                                          .gpu_uuid = gpu_uuid_}));
  CRUMB_ASSIGN_OR_RETURN(DataPlanes planes, OpenDataPlanes(attached.info));
  const bool draining = attached.draining;
  auto session = std::make_shared<Session>(control, std::move(attached), std::move(planes), clock_);
  {
    absl::MutexLock lock(&mutex_);
    if (last_session_ != nullptr) {
      last_session_->SetNextEpoch(session->info().epoch);
      last_session_ = nullptr;
    }
    session_ = session;
    state_.attached = true;
    state_.epoch = session->info().epoch;
    state_.session_id = session->info().id.value();
    ++state_.num_attaches;
    state_.data_plane = session->planes().in_use;
    state_.data_plane_note = session->planes().note;
    state_.reads_gpu_pages = session->info().gpu >= 0 && session->planes().map != nullptr;
    state_.gpu_note = GpuNote(*session);
    state_.draining = draining;
    state_.last_error = absl::OkStatus();
  }
  for (;;) {
    CRUMB_RETURN_IF_ERROR(control->WaitForNews());
    absl::MutexLock lock(&mutex_);
    state_.draining = true;
  }
}

std::string SessionKeeper::GpuNote(const Session& session) const {
  if (options_.gpu < 0 || session.planes().map != nullptr) {
    return session.info().gpu_note;
  }
  return absl::StrCat("pages come over UCX, which is not asked for device memory: they land in ",
                      "page-locked host memory, and UploadToGpu copies them on to GPU ",
                      options_.gpu);
}

absl::StatusOr<DataPlanes> SessionKeeper::OpenDataPlanes(const SessionInfo& info) {
  const absl::Time deadline = clock_.Now() + kDataPlaneTimeout;
  DataPlanes planes;
  if (options_.data_plane != DataPlane::kUcx) {
    auto map =
        MapTransport::Connect({.verify_pages = options_.verify_mapped_pages, .gpu = options_.gpu},
                              info, deadline, clock_);
    if (map.ok()) {
      planes.in_use = DataPlane::kMap;
      planes.map = *std::move(map);
      planes.map->MapAhead(clock_.Now() + kMapAheadTime);
      return planes;
    }
    if (options_.data_plane == DataPlane::kMap) {
      return map.status();
    }
    planes.note = absl::StrCat("no memory map: ", map.status().message());
  }
  auto ucx = ConnectUcx(info, deadline);
  if (!ucx.ok()) {
    return planes.note.empty()
               ? ucx.status()
               : absl::Status(ucx.status().code(),
                              absl::StrCat(planes.note, "; no UCX: ", ucx.status().message()));
  }
  planes.in_use = DataPlane::kUcx;
  planes.ucx = *std::move(ucx);
  return planes;
}

void SessionKeeper::LeaseMain() {
  for (;;) {
    std::shared_ptr<Session> session;
    {
      absl::MutexLock lock(&mutex_);
      const auto has_session = [this] {
        mutex_.AssertReaderHeld();
        return stopping_ || session_ != nullptr;
      };
      mutex_.Await(absl::Condition(&has_session));
      if (stopping_) {
        return;
      }
      session = session_;
    }
    KeepLeases(session.get());
  }
}

void SessionKeeper::KeepLeases(Session* session) {
  const absl::Duration interval = session->lease_time() / kRenewalsPerLease;
  absl::Time next_renewal = clock_.Now() + interval;
  while (session->status().ok()) {
    const Session::Work work = session->WaitForWork(next_renewal);
    if (!session->status().ok()) {
      return;
    }
    const absl::Time now = clock_.Now();
    if (!work.release.empty()) {
      // Lost releases cost the daemon a lease time of memory, no more.
      session->control().ReleaseLeases(work.release, now + interval).IgnoreError();
    }
    if (now < next_renewal) {
      continue;
    }
    next_renewal = now + interval;
    session->planes().transport()->Maintain();
    if (!work.renew.empty()) {
      const auto renewed = session->control().RenewLeases(work.renew, now + interval);
      if (renewed.ok()) {
        session->Renewed(work.renew, *renewed, now);
      }
    }
  }
}

absl::StatusOr<std::shared_ptr<Session>> SessionKeeper::Current() const {
  absl::MutexLock lock(&mutex_);
  if (session_ != nullptr) {
    return session_;
  }
  return absl::UnavailableError(absl::StrCat("not attached to crumbd ", options_.address,
                                             ", and trying again: ", state_.last_error.message()));
}

}  // namespace crumb
