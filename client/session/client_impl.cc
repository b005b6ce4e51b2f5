// SPDX-License-Identifier: Apache-2.0
#include "client/session/client_impl.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/session/prefix.h"
#include "client/session/publisher.h"
#include "proto/base/service_address.h"
#include "proto/base/status_macros.h"
#include "proto/base/utf8.h"
#include "proto/page/check_heads.h"
#include "proto/page/namespace_id.h"

namespace crumb {
namespace {

constexpr absl::Duration kBackoffMin = absl::Milliseconds(50);
// To open a data plane once the session is there; also bounds how long one can stay unused.
constexpr absl::Duration kDataPlaneTimeout = absl::Seconds(5);
// For which an attach waits so that the lookups after it need not.
constexpr absl::Duration kMapAheadTime = absl::Milliseconds(100);
// Of a lease, after which it is renewed: two more attempts fit before it is over.
constexpr int kRenewalsPerLease = 3;

constexpr size_t kMaxTokens = size_t{1} << 20;  // LookupRequest.tokens.

// Trying again with the same options cannot mend these.
bool IsPermanent(absl::StatusCode code) {
  return code == absl::StatusCode::kInvalidArgument ||
         code == absl::StatusCode::kFailedPrecondition ||
         code == absl::StatusCode::kPermissionDenied ||
         code == absl::StatusCode::kUnauthenticated || code == absl::StatusCode::kUnimplemented;
}

absl::Status CheckPrompt(std::span<const uint32_t> tokens, const std::string& context_key) {
  if (tokens.size() > kMaxTokens) {
    return absl::InvalidArgumentError(absl::StrCat("a prompt of ", tokens.size(),
                                                   " tokens; at most ", kMaxTokens,
                                                   ": look up, or publish, its first part"));
  }
  // The daemon could not say so: it has no message that it can read.
  return IsUtf8(context_key) ? absl::OkStatus()
                             : absl::InvalidArgumentError(
                                   "context_key is not UTF-8: write bytes as hexadecimal digits");
}

// The daemon may have ended a session whose end has not arrived here yet, for example because this
// process was stopped. To the engine that is as if it were not attached.
absl::Status WhileAttaching(const absl::Status& status) {
  if (status.code() != absl::StatusCode::kFailedPrecondition) {
    return status;
  }
  return absl::UnavailableError(absl::StrCat("attaching anew, since ", status.message()));
}

// A pull costs by the byte. Where a page's BF16 rows are wanted, its INT2 rows can be made of them.
std::vector<PagePlaces> PlacesToPull(std::vector<PagePlaces> pages) {
  for (PagePlaces& page : pages) {
    if (page.bf16.present()) {
      page.int2 = {};
    }
  }
  return pages;
}

}  // namespace

ClientImpl::ClientImpl(ClientOptions options, const GpuUuid& gpu_uuid, const Clock& clock)
    : options_(std::move(options)), gpu_uuid_(gpu_uuid), clock_(clock) {
  state_.last_error =
      absl::UnavailableError(absl::StrCat("crumbd ", options_.address, " has not answered yet"));
  attach_thread_ = std::thread([this] { AttachMain(); });
  lease_thread_ = std::thread([this] { LeaseMain(); });
}

ClientImpl::~ClientImpl() {
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

absl::Status ClientImpl::WaitAttached(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  const auto is_decided = [this] {
    mutex_.AssertReaderHeld();
    return state_.attached || IsPermanent(state_.last_error.code());
  };
  mutex_.AwaitWithTimeout(absl::Condition(&is_decided), timeout);
  return state_.attached ? absl::OkStatus() : state_.last_error;
}

ClientState ClientImpl::state() const {
  absl::MutexLock lock(&mutex_);
  return state_;
}

void ClientImpl::AttachMain() {
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

void ClientImpl::Pause(absl::Duration backoff) {
  // Spread, so that the engines of a node do not all come back in the same moment.
  static thread_local std::minstd_rand random(std::random_device{}());
  const double factor = std::uniform_real_distribution<double>(0.5, 1.0)(random);
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithTimeout(absl::Condition(&stopping_), factor * backoff);
}

absl::Status ClientImpl::RunSession() {
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

std::string ClientImpl::GpuNote(const Session& session) const {
  if (options_.gpu < 0 || session.planes().map != nullptr) {
    return session.info().gpu_note;
  }
  return absl::StrCat("pages come over UCX, which is not asked for device memory: they land in ",
                      "page-locked host memory, and UploadToGpu copies them on to GPU ",
                      options_.gpu);
}

absl::StatusOr<DataPlanes> ClientImpl::OpenDataPlanes(const SessionInfo& info) {
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

void ClientImpl::LeaseMain() {
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

void ClientImpl::KeepLeases(Session* session) {
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

absl::StatusOr<std::shared_ptr<Session>> ClientImpl::Current() const {
  absl::MutexLock lock(&mutex_);
  if (session_ != nullptr) {
    return session_;
  }
  return absl::UnavailableError(absl::StrCat("not attached to crumbd ", options_.address,
                                             ", and trying again: ", state_.last_error.message()));
}

absl::StatusOr<std::shared_ptr<PrefixHandle>> ClientImpl::Lookup(std::span<const uint32_t> tokens,
                                                                 const LookupOptions& options) {
  CRUMB_RETURN_IF_ERROR(CheckPrompt(tokens, options.context_key));
  CRUMB_ASSIGN_OR_RETURN(std::shared_ptr<Session> session, Current());
  if (tokens.empty()) {
    return std::make_shared<Prefix>(std::move(session), FoundPrefix{}, nullptr);
  }
  const absl::Time sent_at = clock_.Now();
  const auto found = session->control().Lookup({.context_key = options.context_key,
                                                .tokens = tokens,
                                                .allow_int2_window = options.allow_int2_window},
                                               sent_at + options.timeout);
  if (!found.ok()) {
    return WhileAttaching(found.status());
  }
  if (found->lease == LeaseId()) {
    return std::make_shared<Prefix>(std::move(session), *found, nullptr);
  }
  session->AddLease(found->lease, sent_at + found->lease_for);
  auto source = OpenSource(*session, *found, options, sent_at);
  if (!source.ok()) {
    session->ReleaseLease(found->lease);
    return source.status();
  }
  return std::make_shared<Prefix>(std::move(session), *found, *std::move(source), options_.gpu);
}

absl::StatusOr<std::unique_ptr<PageSource>> ClientImpl::OpenSource(const Session& session,
                                                                   const FoundPrefix& found,
                                                                   const LookupOptions& options,
                                                                   absl::Time sent_at) {
  const bool pull = session.planes().map == nullptr;
  const LeasedPrefix prefix{.lease = found.lease,
                            .namespace_id = ComputeNamespaceId(
                                options_.tenant, session.info().profile->id(), options.context_key),
                            .pages = pull ? PlacesToPull(found.pages) : found.pages};
  if (options.on_gpu && !pull) {
    return session.planes().map->OpenOnGpu(prefix, sent_at + options.timeout);
  }
  return session.planes().transport()->Open(
      prefix, sent_at + (pull ? options.pull_timeout : options.timeout));
}

absl::Status ClientImpl::CheckRows(const ProfileId& profile_id, const HeadRange& heads) const {
  if (profile_id == options_.profile->id() && heads == options_.heads) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "the sequence is of profile ", profile_id.Short(), " and KV heads ", heads.first, " + ",
      heads.count, ", the client of profile ", options_.profile->id().Short(), " and KV heads ",
      options_.heads.first, " + ", options_.heads.count, "; make both with the same"));
}

absl::StatusOr<PublishResult> ClientImpl::Publish(const Sequence& sequence,
                                                  std::span<const uint32_t> tokens,
                                                  const PublishOptions& options) {
  CRUMB_RETURN_IF_ERROR(CheckRows(sequence.profile().id(), sequence.heads()));
  SequenceExporter exporter(sequence);
  return PublishPages(exporter, tokens, options);
}

absl::StatusOr<PublishResult> ClientImpl::PublishFromGpu(const GpuPages& pages,
                                                         std::span<const uint32_t> tokens,
                                                         const PublishOptions& options) {
  if (options_.gpu < 0) {
    return absl::FailedPreconditionError(
        "ClientOptions::gpu is -1; name the GPU in whose memory the pages are");
  }
  if (const ProfileId* profile_id = pages.profile_id(); profile_id != nullptr) {
    CRUMB_RETURN_IF_ERROR(CheckRows(*profile_id, pages.heads()));
  }
  const ScopedGpu current(options_.gpu);
  CRUMB_RETURN_IF_ERROR(current.status());
  CRUMB_ASSIGN_OR_RETURN(const std::unique_ptr<GpuExporter> exporter, GpuExporter::Create(pages));
  return PublishPages(*exporter, tokens, options);
}

absl::StatusOr<PublishResult> ClientImpl::PublishPages(PageExporter& exporter,
                                                       std::span<const uint32_t> tokens,
                                                       const PublishOptions& options) {
  CRUMB_RETURN_IF_ERROR(CheckPrompt(tokens, options.context_key));
  if (tokens.empty() || tokens.size() % kPageTokens != 0 || tokens.size() > exporter.length()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "publish of ", tokens.size(), " tokens; it must be a multiple of ", kPageTokens,
        ", at least one page, and within the sequence's ", exporter.length(), " tokens"));
  }
  const absl::Time deadline = clock_.Now() + options.timeout;
  CRUMB_ASSIGN_OR_RETURN(const std::shared_ptr<Session> session, Current());
  return Publisher({}, session, exporter, clock_).Run(options.context_key, tokens, deadline);
}

absl::StatusOr<std::unique_ptr<Client>> Client::Create(ClientOptions options) {
  const auto refuse = [](const char* option, const std::string& problem) {
    return absl::InvalidArgumentError(absl::StrCat("ClientOptions::", option, " ", problem));
  };
  if (options.profile == nullptr) {
    return refuse("profile", "is null; load the model's profile first");
  }
  if (const absl::Status address = CheckServiceAddress(options.address); !address.ok()) {
    return refuse("address", absl::StrCat("is wrong: ", address.message()));
  }
  if (options.client_name.empty() || options.client_name.size() > 128 ||
      !IsUtf8(options.client_name)) {
    return refuse("client_name", absl::StrCat("has ", options.client_name.size(),
                                              " bytes; it must have 1 to 128, in UTF-8"));
  }
  const uint32_t model_heads = options.profile->geometry().num_kv_heads;
  options.heads = options.heads.Resolve(model_heads);
  CRUMB_RETURN_IF_ERROR(CheckHeads("ClientOptions::heads", options.heads, model_heads));
  if (options.tenant.empty()) {
    options.tenant = "default";
  }
  if (options.reconnect_backoff_max <= absl::ZeroDuration()) {
    return refuse("reconnect_backoff_max", "must be positive");
  }
  GpuUuid gpu_uuid{};
  if (options.gpu >= 0) {
    const auto uuid = GetGpuUuid(options.gpu);
    if (!uuid.ok()) {
      return absl::Status(uuid.status().code(), absl::StrCat("ClientOptions::gpu is ", options.gpu,
                                                             ": ", uuid.status().message()));
    }
    gpu_uuid = *uuid;
  }
  return std::make_unique<ClientImpl>(std::move(options), gpu_uuid, Clock::System());
}

}  // namespace crumb
