// SPDX-License-Identifier: Apache-2.0
#include "daemon/rpc/attach_stream.h"

#include <string>
#include <utility>
#include <vector>

#include "daemon/log/log.h"
#include "daemon/rpc/grpc_status.h"
#include "daemon/rpc/request.h"
#include "proto/base/status_macros.h"

// shared: the header says by whom.

namespace crumb {
namespace {

// Parses a profile file on the pool: a large one would hold up a gRPC thread for too long.
class ParseProfileJob : public DemoteJob {
 public:
  using Done = std::function<void(absl::StatusOr<std::shared_ptr<const Profile>>)>;

  ParseProfileJob(const RpcContext& context, const ProfileId& id, std::string file, Done done)
      : profiles_(context.profiles),
        demoter_(context.demoter),
        id_(id),
        file_(std::move(file)),
        done_(std::move(done)) {}

  size_t num_pages() const override { return 1; }
  absl::Status RunPage(size_t /*index*/, DemoteScratch& /*scratch*/) override {
    CRUMB_ASSIGN_OR_RETURN(profile_, profiles_.Add(id_, file_));
    return absl::OkStatus();
  }
  void Finish(absl::Status status) override {
    if (!status.ok()) {
      done_(std::move(status));
      return;
    }
    done_(profile_);
    if (demoter_ == nullptr) {
      return;
    }
    demoter_->Prepare(*profile_);  // The engine is attached, and will publish.
    if (demoter_->MaxHeads(*profile_) == 0) {
      LogEvent(LogLevel::kInfo, "profile_demoted_on_the_cpu",
               {{"profile", profile_->id().Hex()},
                {"codec", CodecName(profile_->codec())},
                {"why", "the GPU has no kernel for its geometry or for its key_ranges"}});
    }
  }

 private:
  ProfileRegistry& profiles_;
  DeviceDemoter* const demoter_;
  const ProfileId id_;
  const std::string file_;
  const Done done_;
  std::shared_ptr<const Profile> profile_;
};

}  // namespace

std::vector<AttachStream*> AttachStreams::HoldAll() {
  std::vector<AttachStream*> held;
  absl::MutexLock lock(&mutex_);
  for (AttachStream* stream : streams_) {
    if (stream->Hold()) {
      held.push_back(stream);
    }
  }
  return held;
}

void AttachStreams::EndAll() {
  for (AttachStream* stream : HoldAll()) {
    stream->End(absl::UnavailableError("the daemon has stopped: attach again when it is back"));
    stream->Release();
  }
}

void AttachStreams::SetDraining() {
  draining_ = true;
  for (AttachStream* stream : HoldAll()) {
    stream->NotifyDraining();
    stream->Release();
  }
}

void AttachStreams::Add(AttachStream* stream) {
  absl::MutexLock lock(&mutex_);
  streams_.insert(stream);
}

void AttachStreams::Remove(AttachStream* stream) {
  absl::MutexLock lock(&mutex_);
  streams_.erase(stream);
}

AttachStream::AttachStream(RpcContext& context, AttachStreams& streams)
    : context_(context), streams_(streams), start_(context.clock.Now()) {
  streams_.Add(this);
  StartRead(&request_);
}

void AttachStream::OnReadDone(bool ok) {
  bool is_first = false;
  bool attaches = false;
  {
    absl::MutexLock lock(&mutex_);
    is_first = !std::exchange(opened_, true);
    // An engine that died may have ended the stream before its request is seen.
    attaches = ok && is_first && !finished_;
    if (attaches) {
      ++holds_;
    }
  }
  if (attaches) {
    Attach();
  } else if (!ok) {
    End(is_first ? absl::InvalidArgumentError("the stream ended before its AttachRequest")
                 : absl::OkStatus());
  } else if (!is_first) {
    End(absl::InvalidArgumentError(
        "a second AttachRequest on one stream: open another stream for another session"));
  }
}

void AttachStream::OnWriteDone(bool ok) {
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
  }
  if (ok) {
    WriteOrFinish();
  } else {
    End(absl::UnavailableError("the engine is gone"));
  }
}

void AttachStream::OnCancel() {
  End(absl::CancelledError("the engine is gone"));
}

void AttachStream::OnDone() {
  streams_.Remove(this);
  delete this;
}

void AttachStream::Attach() {
  absl::StatusOr<AttachSpec> spec = ParseAttach(request_);
  if (!spec.ok()) {
    AttachWith({}, spec.status());
    return;
  }
  absl::StatusOr<std::shared_ptr<const Profile>> profile = context_.profiles.Find(spec->profile_id);
  if (profile.ok() || request_.profile_file().empty()) {
    AttachWith(*spec, std::move(profile));
    return;
  }
  auto job = std::make_unique<ParseProfileJob>(
      context_, spec->profile_id, std::move(*request_.mutable_profile_file()),
      [this, spec = *spec](absl::StatusOr<std::shared_ptr<const Profile>> parsed) {
        AttachWith(spec, std::move(parsed));
      });
  if (absl::Status status = context_.pool.Submit(std::move(job)); !status.ok()) {
    AttachWith(*spec, std::move(status));
  }
}

void AttachStream::AttachWith(const AttachSpec& spec,
                              absl::StatusOr<std::shared_ptr<const Profile>> profile) {
  auto session = profile.ok()
                     ? context_.sessions.Attach(spec, *std::move(profile))
                     : absl::StatusOr<std::shared_ptr<const AttachedEngine>>(profile.status());
  context_.metrics.OnRpc(RpcMethod::kAttach, session.status().code(),
                         context_.clock.Now() - start_);
  if (!session.ok()) {
    LogEvent(LogLevel::kInfo, "attach_refused",
             {{"client", spec.client_name}, {"pid", spec.pid}, {"status", session.status()}});
    End(session.status());
    Release();
    return;
  }
  LogEvent(LogLevel::kInfo, "session_attached",
           {{"session", (*session)->id.value()},
            {"client", spec.client_name},
            {"pid", spec.pid},
            {"tenant", spec.tenant},
            {"profile", spec.profile_id.Short()},
            {"first_head", (*session)->heads.first},
            {"heads", (*session)->heads.count}});
  bool is_gone = false;
  {
    absl::MutexLock lock(&mutex_);
    is_gone = ended_;
    session_ = *session;
    to_send_ = std::make_unique<v1::AttachReply>(MakeReply(**session));
  }
  if (is_gone) {
    // End came before there was a session to end.
    context_.sessions.Detach((*session)->id);
  } else {
    request_.Clear();
    StartRead(&request_);  // For its end, which is the stream's.
  }
  Release();
}

v1::AttachReply AttachStream::MakeReply(const AttachedEngine& session) const {
  v1::AttachReply reply;
  reply.mutable_session()->set_id(session.id.value());
  reply.mutable_session()->set_secret(session.secret.data(), session.secret.size());
  reply.set_epoch(context_.epoch);
  reply.set_lease_ms(
      static_cast<uint32_t>(absl::ToInt64Milliseconds(context_.store.options().lease)));
  reply.set_memory_socket(context_.memory_socket);
  if (context_.ucx != nullptr) {
    const UcxEndpoint endpoint = context_.ucx->endpoint();
    reply.mutable_ucx()->set_host(endpoint.host);
    reply.mutable_ucx()->set_port(endpoint.port);
    reply.mutable_ucx()->set_version(endpoint.version);
  }
  reply.set_daemon_version(context_.version);
  reply.set_draining(streams_.draining());
  reply.set_offers_gpu_pages(session.reads_gpu_pages);
  reply.set_gpu_note(session.gpu_note);
  return reply;
}

bool AttachStream::Hold() {
  absl::MutexLock lock(&mutex_);
  if (!finished_) {
    ++holds_;
  }
  return !finished_;
}

void AttachStream::Release() {
  {
    absl::MutexLock lock(&mutex_);
    --holds_;
  }
  WriteOrFinish();
}

void AttachStream::NotifyDraining() {
  absl::MutexLock lock(&mutex_);
  if (session_ != nullptr && !ended_) {
    to_send_ = std::make_unique<v1::AttachReply>(MakeReply(*session_));
  }
}

void AttachStream::End(const absl::Status& status) {
  std::shared_ptr<const AttachedEngine> session;
  {
    absl::MutexLock lock(&mutex_);
    if (!std::exchange(ended_, true)) {
      status_ = status;
      session = session_;
    }
  }
  if (session != nullptr) {
    context_.sessions.Detach(session->id);
    LogEvent(LogLevel::kInfo, "session_ended",
             {{"session", session->id.value()},
              {"client", session->spec.client_name},
              {"seconds", absl::ToDoubleSeconds(context_.clock.Now() - start_)},
              {"status", status}});
  }
  WriteOrFinish();
}

void AttachStream::WriteOrFinish() {
  absl::Status status;
  bool is_end = false;
  {
    absl::MutexLock lock(&mutex_);
    if (holds_ > 0 || writing_ || finished_ || (!ended_ && to_send_ == nullptr)) {
      return;
    }
    is_end = ended_;
    if (is_end) {
      finished_ = true;
      status = status_;
    } else {
      writing_ = true;
      sent_ = *to_send_;
      to_send_.reset();
    }
  }
  if (is_end) {
    Finish(ToGrpcStatus(status));
  } else {
    StartWrite(&sent_);
  }
}

}  // namespace crumb
