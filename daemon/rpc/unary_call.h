// SPDX-License-Identifier: Apache-2.0
//
// How a call is counted and answered.
#pragma once

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/support/server_callback.h"

#include "daemon/metrics/metrics.h"
#include "daemon/rpc/grpc_status.h"
#include "daemon/rpc/rpc_context.h"

namespace crumb {

// One call from its arrival to its answer. A value that whoever answers keeps.
class UnaryCall {
 public:
  UnaryCall(const RpcContext& context, grpc::CallbackServerContext* call, RpcMethod method)
      : context_(&context),
        reactor_(call->DefaultReactor()),
        method_(method),
        start_(context.clock.Now()) {}

  // Once, from any thread. Returns the reactor for the service method to return.
  grpc::ServerUnaryReactor* Finish(const absl::Status& status) const {
    grpc::ServerUnaryReactor* const reactor = reactor_;
    context_->metrics.OnRpc(method_, status.code(), context_->clock.Now() - start_);
    reactor->Finish(ToGrpcStatus(status));
    return reactor;
  }
  grpc::ServerUnaryReactor* reactor() const { return reactor_; }

 private:
  const RpcContext* context_;
  grpc::ServerUnaryReactor* reactor_;
  RpcMethod method_;
  absl::Time start_;
};

}  // namespace crumb
