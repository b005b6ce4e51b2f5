// SPDX-License-Identifier: Apache-2.0
//
// The service Admin of admin.proto: what crumbctl asks.
#pragma once

#include "grpcpp/support/server_callback.h"

#include "daemon/rpc/rpc_context.h"
#include "proto/crumb/v1/admin.grpc.pb.h"

namespace crumb {

// Thread-safe.
class AdminService : public v1::Admin::CallbackService {
 public:
  explicit AdminService(RpcContext& context) : context_(context) {}

  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* call,
                                      const v1::GetStatusRequest* request,
                                      v1::GetStatusReply* reply) override;
  grpc::ServerUnaryReactor* GetTree(grpc::CallbackServerContext* call,
                                    const v1::GetTreeRequest* request,
                                    v1::GetTreeReply* reply) override;
  grpc::ServerUnaryReactor* Evict(grpc::CallbackServerContext* call,
                                  const v1::EvictRequest* request,
                                  v1::EvictReply* reply) override;

 private:
  absl::Status DoGetTree(const v1::GetTreeRequest& request, v1::GetTreeReply& reply);
  absl::Status DoEvict(const v1::EvictRequest& request, v1::EvictReply& reply);

  RpcContext& context_;
};

}  // namespace crumb
