// SPDX-License-Identifier: Apache-2.0
#include "client/session/rpc_calls.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "proto/base/clock.h"

namespace crumb {

absl::Status RpcCalls::Run(const char* name,
                           absl::Time deadline,
                           absl::FunctionRef<grpc::Status(grpc::ClientContext&)> call) {
  grpc::ClientContext context;
  const absl::Duration timeout = SetDeadline(deadline, &context);
  if (!Register(&context)) {
    return Cancelled(name);
  }
  const grpc::Status status = call(context);
  Unregister(&context);
  return ToStatus(name, timeout, status);
}

void RpcCalls::CancelAll() {
  absl::MutexLock lock(&mutex_);
  cancelled_ = true;
  for (grpc::ClientContext* context : contexts_) {
    context->TryCancel();  // Only starts it: does not wait, and calls no one back.
  }
}

bool RpcCalls::Register(grpc::ClientContext* context) {
  absl::MutexLock lock(&mutex_);
  if (!cancelled_) {
    contexts_.insert(context);
  }
  return !cancelled_;
}

void RpcCalls::Unregister(grpc::ClientContext* context) {
  absl::MutexLock lock(&mutex_);
  contexts_.erase(context);
}

absl::Duration RpcCalls::SetDeadline(absl::Time deadline, grpc::ClientContext* context) {
  const absl::Duration timeout = deadline - Clock::System().Now();
  context->set_deadline(
      gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                   gpr_time_from_micros(std::max<int64_t>(0, absl::ToInt64Microseconds(timeout)),
                                        GPR_TIMESPAN)));
  return timeout;
}

absl::Status RpcCalls::Cancelled(const char* name) {
  return absl::CancelledError(absl::StrCat(name, ": this client is shutting down"));
}

absl::Status RpcCalls::ToStatus(const char* name, const grpc::Status& status) const {
  if (status.ok()) {
    return absl::OkStatus();
  }
  // The codes of both have the same numbers.
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                      absl::StrCat(name, " at crumbd ", address_, ": ", status.error_message()));
}

absl::Status RpcCalls::ToStatus(const char* name,
                                absl::Duration timeout,
                                const grpc::Status& status) const {
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
    return absl::DeadlineExceededError(
        absl::StrCat(name, ": crumbd ", address_, " did not answer within ",
                     absl::FormatDuration(timeout), "; is it stopped or overloaded?"));
  }
  return ToStatus(name, status);
}

}  // namespace crumb
