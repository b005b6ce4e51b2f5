// SPDX-License-Identifier: Apache-2.0
//
// The service Cache of cache.proto. Thin: parses and checks, calls the store, maps the status. What
// copies page bytes or runs the codec goes to the demotion pool, which answers the call itself.
#pragma once

#include "grpcpp/support/server_callback.h"

#include "daemon/rpc/attach_stream.h"
#include "daemon/rpc/publish_job.h"
#include "daemon/rpc/rpc_context.h"
#include "proto/crumb/v1/cache.grpc.pb.h"

namespace crumb {

// Every method by callback, and Lookup by the bytes of its messages (lookup_message.h).
using CacheMethods = v1::Cache::WithCallbackMethod_Attach<v1::Cache::WithRawCallbackMethod_Lookup<
    v1::Cache::WithCallbackMethod_Probe<v1::Cache::WithCallbackMethod_BeginPublish<
        v1::Cache::WithCallbackMethod_WritePages<v1::Cache::WithCallbackMethod_CommitPublish<
            v1::Cache::WithCallbackMethod_AbortPublish<v1::Cache::WithCallbackMethod_RenewLeases<
                v1::Cache::WithCallbackMethod_ReleaseLeases<v1::Cache::Service>>>>>>>>>;

// Thread-safe.
class CacheService : public CacheMethods {
 public:
  explicit CacheService(RpcContext& context) : context_(context) {}

  // Every session is sent an AttachReply with `draining`.
  void SetDraining() { streams_.SetDraining(); }
  // Every session ends, and its stream.
  void EndSessions() { streams_.EndAll(); }

  grpc::ServerBidiReactor<v1::AttachRequest, v1::AttachReply>* Attach(
      grpc::CallbackServerContext* call) override;
  grpc::ServerUnaryReactor* Lookup(grpc::CallbackServerContext* call,
                                   const grpc::ByteBuffer* request,
                                   grpc::ByteBuffer* reply) override;
  grpc::ServerUnaryReactor* Probe(grpc::CallbackServerContext* call,
                                  const v1::ProbeRequest* request,
                                  v1::ProbeReply* reply) override;
  grpc::ServerUnaryReactor* BeginPublish(grpc::CallbackServerContext* call,
                                         const v1::BeginPublishRequest* request,
                                         v1::BeginPublishReply* reply) override;
  grpc::ServerUnaryReactor* WritePages(grpc::CallbackServerContext* call,
                                       const v1::WritePagesRequest* request,
                                       v1::WritePagesReply* reply) override;
  grpc::ServerUnaryReactor* CommitPublish(grpc::CallbackServerContext* call,
                                          const v1::CommitPublishRequest* request,
                                          v1::CommitPublishReply* reply) override;
  grpc::ServerUnaryReactor* AbortPublish(grpc::CallbackServerContext* call,
                                         const v1::AbortPublishRequest* request,
                                         v1::AbortPublishReply* reply) override;
  grpc::ServerUnaryReactor* RenewLeases(grpc::CallbackServerContext* call,
                                        const v1::RenewLeasesRequest* request,
                                        v1::RenewLeasesReply* reply) override;
  grpc::ServerUnaryReactor* ReleaseLeases(grpc::CallbackServerContext* call,
                                          const v1::ReleaseLeasesRequest* request,
                                          v1::ReleaseLeasesReply* reply) override;

 private:
  // The session that a request proves to speak for. UNAUTHENTICATED: not its secret.
  // FAILED_PRECONDITION: no such session, or it ended.
  absl::StatusOr<SessionId> Authenticate(const v1::SessionKey& key) const;
  absl::Status DoLookup(const grpc::ByteBuffer& request, grpc::ByteBuffer& reply);
  absl::Status DoProbe(const v1::ProbeRequest& request, v1::ProbeReply& reply);
  absl::Status DoBeginPublish(const v1::BeginPublishRequest& request, v1::BeginPublishReply& reply);
  absl::Status DoAbortPublish(const v1::AbortPublishRequest& request);
  absl::Status DoRenewLeases(const v1::RenewLeasesRequest& request, v1::RenewLeasesReply& reply);
  absl::Status DoReleaseLeases(const v1::ReleaseLeasesRequest& request);
  // Answers from the pool, by `done`, if OK.
  template <typename Request>  // WritePagesRequest, CommitPublishRequest.
  absl::Status StartWriting(const Request& request, bool commits, const PublishJob::Done& done);
  // shared: see StagingMemory.
  absl::StatusOr<std::shared_ptr<const StagingMemory>> FindStaging(v1::Staging staging,
                                                                   SessionId session,
                                                                   PublishId publish);
  // What came over UCX for a publish that has ended.
  void DropStaging(SessionId session, PublishId publish);
  uint32_t lease_ms() const;

  RpcContext& context_;
  AttachStreams streams_;
};

}  // namespace crumb
