// SPDX-License-Identifier: Apache-2.0
//
// Calls under way to one daemon: their deadlines, their end when the client ends, and what their
// failures are told as. Thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>

#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace crumb {

class RpcCalls {
 public:
  // `address` is the daemon's, for messages.
  explicit RpcCalls(std::string address) : address_(std::move(address)) {}

  // Makes one call, by `call`, and waits for its end.
  absl::Status Run(const char* name,
                   absl::Time deadline,
                   absl::FunctionRef<grpc::Status(grpc::ClientContext&)> call);
  // Ends those under way, and all to come.
  void CancelAll();

  // For calls that nobody waits for. Register, before a call, is false once all are cancelled.
  bool Register(grpc::ClientContext* context);
  void Unregister(grpc::ClientContext* context);
  // Returns the time that is left.
  static absl::Duration SetDeadline(absl::Time deadline, grpc::ClientContext* context);
  static absl::Status Cancelled(const char* name);
  absl::Status ToStatus(const char* name, const grpc::Status& status) const;
  // Of a call that was given so long.
  absl::Status ToStatus(const char* name, absl::Duration timeout, const grpc::Status& status) const;

 private:
  const std::string address_;
  absl::Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  absl::flat_hash_set<grpc::ClientContext*> contexts_ ABSL_GUARDED_BY(mutex_);  // Calls under way.
};

}  // namespace crumb
