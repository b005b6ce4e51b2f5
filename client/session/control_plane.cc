// SPDX-License-Identifier: Apache-2.0
#include "client/session/control_plane.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/session/daemon_channel.h"
#include "client/session/lookup_stub.h"
#include "client/session/page_places.h"
#include "client/session/rpc_calls.h"
#include "proto/base/status_macros.h"
#include "proto/base/version.h"
#include "proto/crumb/v1/cache.grpc.pb.h"

namespace crumb {
namespace {

static_assert(std::endian::native == std::endian::little, "tokens travel as they lie in memory");

std::string PackDigest(const Digest& digest) {
  return std::string(reinterpret_cast<const char*>(digest.bytes.data()), Digest::kBytes);
}

v1::Encoding WireEncoding(PageEncoding encoding) {
  return encoding == PageEncoding::kInt2 ? v1::ENCODING_INT2 : v1::ENCODING_BF16;
}

class GrpcControlPlane : public ControlPlane {
 public:
  explicit GrpcControlPlane(const std::string& address)
      : GrpcControlPlane(address, ConnectToDaemon(address)) {}

  ~GrpcControlPlane() override {
    calls_.CancelAll();
    FinishStream().IgnoreError();  // That it was cancelled.
  }
  GrpcControlPlane(const GrpcControlPlane&) = delete;
  GrpcControlPlane& operator=(const GrpcControlPlane&) = delete;

  absl::StatusOr<AttachedSession> Attach(const AttachParams& params) override;
  absl::Status WaitForNews() override;
  void Cancel() override { calls_.CancelAll(); }
  absl::StatusOr<FoundPrefix> Lookup(const LookupParams& params, absl::Time deadline) override;
  absl::StatusOr<MissingPages> BeginPublish(const std::string& context_key,
                                            std::span<const uint32_t> tokens,
                                            absl::Time deadline) override;
  void StartWrite(const CommitParams& params,
                  absl::Time deadline,
                  std::function<void(const absl::Status&)> done) override;
  absl::StatusOr<CommitCounts> CommitPublish(const CommitParams& params,
                                             absl::Time deadline) override;
  absl::Status AbortPublish(PublishId publish, absl::Time deadline) override;
  absl::StatusOr<RenewedLeases> RenewLeases(std::span<const LeaseId> leases,
                                            absl::Time deadline) override;
  absl::Status ReleaseLeases(std::span<const LeaseId> leases, absl::Time deadline) override;

 private:
  // shared: gRPC's way of handing out channels.
  GrpcControlPlane(const std::string& address, const std::shared_ptr<grpc::Channel>& channel)
      : address_(address),
        stub_(v1::Cache::NewStub(channel)),
        lookup_stub_(channel),
        calls_(address) {}

  template <typename Request, typename Reply>
  using Method = grpc::Status (v1::Cache::Stub::*)(grpc::ClientContext*, const Request&, Reply*);

  template <typename Request, typename Reply>
  absl::Status Call(const char* name,
                    Method<Request, Reply> method,
                    const Request& request,
                    absl::Time deadline,
                    Reply* reply);
  template <typename Request>
  Request Pack(const CommitParams& params) const;
  absl::Status OpenStream(const v1::AttachRequest& request, v1::AttachReply* reply);
  absl::Status FinishStream();
  absl::StatusOr<AttachedSession> Unpack(const v1::AttachReply& reply,
                                         const AttachParams& params) const;

  const std::string address_;
  const std::unique_ptr<v1::Cache::Stub> stub_;
  LookupStub lookup_stub_;
  RpcCalls calls_;

  // Of the thread that attaches and waits for news.
  std::unique_ptr<grpc::ClientContext> stream_context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::AttachRequest, v1::AttachReply>> stream_;
  // Set by Attach, before all calls that prove the session with it.
  v1::SessionKey session_;
};

template <typename Request, typename Reply>
absl::Status GrpcControlPlane::Call(const char* name,
                                    Method<Request, Reply> method,
                                    const Request& request,
                                    absl::Time deadline,
                                    Reply* reply) {
  return calls_.Run(name, deadline, [&](grpc::ClientContext& context) {
    return (stub_.get()->*method)(&context, request, reply);
  });
}

absl::Status GrpcControlPlane::OpenStream(const v1::AttachRequest& request,
                                          v1::AttachReply* reply) {
  stream_context_ = std::make_unique<grpc::ClientContext>();
  if (!calls_.Register(stream_context_.get())) {
    return RpcCalls::Cancelled("Attach");
  }
  stream_ = stub_->Attach(stream_context_.get());
  if (stream_->Write(request) && stream_->Read(reply)) {
    return absl::OkStatus();
  }
  return FinishStream();
}

absl::Status GrpcControlPlane::FinishStream() {
  if (stream_ == nullptr) {
    return absl::OkStatus();
  }
  const grpc::Status status = stream_->Finish();
  stream_ = nullptr;
  calls_.Unregister(stream_context_.get());
  if (status.ok()) {
    return absl::UnavailableError(
        absl::StrCat("crumbd ", address_, " ended the session; it is going away"));
  }
  return calls_.ToStatus("Attach", status);
}

absl::StatusOr<AttachedSession> GrpcControlPlane::Attach(const AttachParams& params) {
  v1::AttachRequest request;
  request.set_client_name(params.client_name);
  request.set_pid(static_cast<uint32_t>(::getpid()));
  request.set_tenant(params.tenant);
  request.set_profile_id(PackDigest(params.profile->id()));
  request.mutable_heads()->set_first(params.heads.first);
  request.mutable_heads()->set_count(params.heads.count);
  request.set_library_version(kCrumbVersion);
  if (params.gpu >= 0) {
    request.set_gpu_uuid(params.gpu_uuid.data(), params.gpu_uuid.size());
  }
  v1::AttachReply reply;
  absl::Status status = OpenStream(request, &reply);
  if (status.code() == absl::StatusCode::kNotFound) {  // The profile is new to the daemon.
    const std::span<const std::byte> file = params.profile->file();
    request.set_profile_file(file.data(), file.size());
    status = OpenStream(request, &reply);
  }
  CRUMB_RETURN_IF_ERROR(status);
  session_ = reply.session();
  return Unpack(reply, params);
}

absl::StatusOr<AttachedSession> GrpcControlPlane::Unpack(const v1::AttachReply& reply,
                                                         const AttachParams& params) const {
  if (reply.session().secret().size() != kSessionSecretBytes || reply.session().id() == 0 ||
      reply.lease_ms() == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("crumbd ", address_, " (version ", reply.daemon_version(),
                     ") answered Attach without a session, a secret or a lease time; use the "
                     "library and the daemon of one release"));
  }
  AttachedSession session;
  session.lease = absl::Milliseconds(reply.lease_ms());
  session.daemon_version = reply.daemon_version();
  session.draining = reply.draining();
  session.info.id = SessionId(reply.session().id());
  std::copy_n(reply.session().secret().begin(), kSessionSecretBytes, session.info.secret.begin());
  session.info.epoch = reply.epoch();
  session.info.memory_socket = reply.memory_socket();
  session.info.ucx_host = reply.ucx().host();
  session.info.ucx_port = reply.ucx().port();
  session.info.ucx_version = reply.ucx().version();
  session.info.profile = params.profile;
  session.info.heads = params.heads;
  session.info.gpu = reply.offers_gpu_pages() ? params.gpu : -1;
  session.info.gpu_note = reply.gpu_note();
  return session;
}

absl::Status GrpcControlPlane::WaitForNews() {
  v1::AttachReply reply;
  while (stream_ != nullptr && stream_->Read(&reply)) {
    if (reply.draining()) {
      return absl::OkStatus();
    }
  }
  return FinishStream();
}

absl::StatusOr<FoundPrefix> GrpcControlPlane::Lookup(const LookupParams& params,
                                                     absl::Time deadline) {
  v1::LookupRequest request;
  *request.mutable_session() = session_;
  request.set_context_key(params.context_key);
  request.set_allow_int2_window(params.allow_int2_window);
  v1::LookupReply reply;
  CRUMB_RETURN_IF_ERROR(calls_.Run("Lookup", deadline, [&](grpc::ClientContext& context) {
    return lookup_stub_.Lookup(context, request, params.tokens, &reply);
  }));
  FoundPrefix found{.matched_tokens = reply.matched_tokens(),
                    .usable_tokens = reply.usable_tokens(),
                    .trimmed_tokens = reply.trimmed_tokens(),
                    .lease = LeaseId(reply.lease_id()),
                    .lease_for = absl::Milliseconds(reply.lease_ms()),
                    .pages = {}};
  CRUMB_ASSIGN_OR_RETURN(found.pages,
                         UnpackPages(reply.pages(), reply.usable_tokens() / kPageTokens));
  CRUMB_RETURN_IF_ERROR(UnpackGpuPages(reply.pages(), &found.pages));
  return found;
}

absl::StatusOr<MissingPages> GrpcControlPlane::BeginPublish(const std::string& context_key,
                                                            std::span<const uint32_t> tokens,
                                                            absl::Time deadline) {
  v1::BeginPublishRequest request;
  *request.mutable_session() = session_;
  request.set_context_key(context_key);
  request.set_tokens(tokens.data(), tokens.size_bytes());
  v1::BeginPublishReply reply;
  CRUMB_RETURN_IF_ERROR(
      Call("BeginPublish", &v1::Cache::Stub::BeginPublish, request, deadline, &reply));
  MissingPages missing{.publish = PublishId(reply.publish_id()), .int2 = {}, .bf16 = {}};
  for (const uint32_t page : reply.int2_missing()) {
    missing.int2.emplace_back(page);
  }
  for (const uint32_t page : reply.bf16_missing()) {
    missing.bf16.emplace_back(page);
  }
  return missing;
}

// WritePagesRequest, CommitPublishRequest.
template <typename Request>
Request GrpcControlPlane::Pack(const CommitParams& params) const {
  Request request;
  *request.mutable_session() = session_;
  request.set_publish_id(params.publish.value());
  request.set_staging(params.over_ucx ? v1::STAGING_UCX : v1::STAGING_MEMFD);
  for (const StagedImage& image : params.staged) {
    v1::StagedPage* page = request.add_staged();
    page->set_page_idx(image.page.value());
    page->set_encoding(WireEncoding(image.encoding));
    page->set_staging_offset(image.offset);
    page->mutable_head_crc32c()->Add(image.head_crc32c.begin(), image.head_crc32c.end());
  }
  return request;
}

void GrpcControlPlane::StartWrite(const CommitParams& params,
                                  absl::Time deadline,
                                  std::function<void(const absl::Status&)> done) {
  struct Call {
    grpc::ClientContext context;
    v1::WritePagesRequest request;
    v1::WritePagesReply reply;
  };
  constexpr const char* kName = "WritePages";
  // shared: std::function must be copyable. It is gRPC's until the answer.
  const auto call = std::make_shared<Call>();
  call->request = Pack<v1::WritePagesRequest>(params);
  const absl::Duration timeout = RpcCalls::SetDeadline(deadline, &call->context);
  if (!calls_.Register(&call->context)) {
    done(RpcCalls::Cancelled(kName));
    return;
  }
  stub_->async()->WritePages(
      &call->context, &call->request, &call->reply,
      [this, call, timeout, done = std::move(done)](const grpc::Status& status) {
        calls_.Unregister(&call->context);
        done(calls_.ToStatus(kName, timeout, status));  // Last: who waits for it may destroy this.
      });
}

absl::StatusOr<CommitCounts> GrpcControlPlane::CommitPublish(const CommitParams& params,
                                                             absl::Time deadline) {
  const auto request = Pack<v1::CommitPublishRequest>(params);
  v1::CommitPublishReply reply;
  CRUMB_RETURN_IF_ERROR(
      Call("CommitPublish", &v1::Cache::Stub::CommitPublish, request, deadline, &reply));
  return CommitCounts{reply.pages_added(), reply.pages_present()};
}

absl::Status GrpcControlPlane::AbortPublish(PublishId publish, absl::Time deadline) {
  v1::AbortPublishRequest request;
  *request.mutable_session() = session_;
  request.set_publish_id(publish.value());
  v1::AbortPublishReply reply;
  return Call("AbortPublish", &v1::Cache::Stub::AbortPublish, request, deadline, &reply);
}

absl::StatusOr<RenewedLeases> GrpcControlPlane::RenewLeases(std::span<const LeaseId> leases,
                                                            absl::Time deadline) {
  v1::RenewLeasesRequest request;
  *request.mutable_session() = session_;
  for (const LeaseId lease : leases) {
    request.add_lease_ids(lease.value());
  }
  v1::RenewLeasesReply reply;
  CRUMB_RETURN_IF_ERROR(
      Call("RenewLeases", &v1::Cache::Stub::RenewLeases, request, deadline, &reply));
  RenewedLeases renewed{.lease_for = absl::Milliseconds(reply.lease_ms()), .ended = {}};
  for (const uint64_t lease : reply.ended_lease_ids()) {
    renewed.ended.emplace_back(lease);
  }
  return renewed;
}

absl::Status GrpcControlPlane::ReleaseLeases(std::span<const LeaseId> leases, absl::Time deadline) {
  v1::ReleaseLeasesRequest request;
  *request.mutable_session() = session_;
  for (const LeaseId lease : leases) {
    request.add_lease_ids(lease.value());
  }
  v1::ReleaseLeasesReply reply;
  return Call("ReleaseLeases", &v1::Cache::Stub::ReleaseLeases, request, deadline, &reply);
}

}  // namespace

std::unique_ptr<ControlPlane> ControlPlane::Create(const std::string& address) {
  return std::make_unique<GrpcControlPlane>(address);
}

}  // namespace crumb
