// SPDX-License-Identifier: Apache-2.0
#include "daemon/ctl/admin_client.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpcpp/grpcpp.h"

#include "proto/crumb/v1/admin.grpc.pb.h"
#include "proto/crumb/v1/cache.grpc.pb.h"

namespace crumb {
namespace {

std::string Packed(std::span<const uint32_t> tokens) {
  return {reinterpret_cast<const char*>(tokens.data()), tokens.size_bytes()};
}

absl::Status FromGrpc(const grpc::Status& status, const std::string& address) {
  switch (status.error_code()) {
    case grpc::StatusCode::OK:
      return absl::OkStatus();
    case grpc::StatusCode::UNAVAILABLE:
      return absl::UnavailableError(
          absl::StrCat("no crumbd answers at ", address, " (", status.error_message(),
                       "): start it, or give its address by --address or CRUMB_ADDRESS"));
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return absl::DeadlineExceededError(
          absl::StrCat("crumbd at ", address,
                       " did not answer in time: it may be stopped or overloaded; "
                       "--timeout gives it longer"));
    default:
      return {static_cast<absl::StatusCode>(status.error_code()), status.error_message()};
  }
}

}  // namespace

struct AdminClient::Stubs {
  std::unique_ptr<v1::Admin::Stub> admin;
  std::unique_ptr<v1::Cache::Stub> cache;
};

AdminClient::AdminClient(std::string address, absl::Duration timeout)
    : address_(std::move(address)), timeout_(timeout), stubs_(std::make_unique<Stubs>()) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);  // A tree may have 100,000 nodes.
  const auto channel =
      grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(), arguments);
  stubs_->admin = v1::Admin::NewStub(channel);
  stubs_->cache = v1::Cache::NewStub(channel);
}

AdminClient::~AdminClient() = default;

absl::StatusOr<v1::GetStatusReply> AdminClient::GetStatus() {
  grpc::ClientContext call;
  call.set_deadline(absl::ToChronoTime(absl::Now() + timeout_));
  v1::GetStatusReply reply;
  const absl::Status status = FromGrpc(stubs_->admin->GetStatus(&call, {}, &reply), address_);
  return status.ok() ? absl::StatusOr<v1::GetStatusReply>(std::move(reply)) : status;
}

absl::StatusOr<v1::GetTreeReply> AdminClient::GetTree(const std::string& namespace_id,
                                                      uint32_t max_nodes) {
  grpc::ClientContext call;
  call.set_deadline(absl::ToChronoTime(absl::Now() + timeout_));
  v1::GetTreeRequest request;
  request.set_namespace_id(namespace_id);
  request.set_max_nodes(max_nodes);
  v1::GetTreeReply reply;
  const absl::Status status = FromGrpc(stubs_->admin->GetTree(&call, request, &reply), address_);
  return status.ok() ? absl::StatusOr<v1::GetTreeReply>(std::move(reply)) : status;
}

absl::StatusOr<v1::ProbeReply> AdminClient::Probe(const std::string& namespace_id,
                                                  std::span<const uint32_t> tokens) {
  grpc::ClientContext call;
  call.set_deadline(absl::ToChronoTime(absl::Now() + timeout_));
  v1::ProbeRequest request;
  request.set_namespace_id(namespace_id);
  request.set_tokens(Packed(tokens));
  v1::ProbeReply reply;
  const absl::Status status = FromGrpc(stubs_->cache->Probe(&call, request, &reply), address_);
  return status.ok() ? absl::StatusOr<v1::ProbeReply>(std::move(reply)) : status;
}

absl::StatusOr<v1::EvictReply> AdminClient::Evict(const std::string& namespace_id,
                                                  std::span<const uint32_t> tokens) {
  grpc::ClientContext call;
  call.set_deadline(absl::ToChronoTime(absl::Now() + timeout_));
  v1::EvictRequest request;
  request.set_namespace_id(namespace_id);
  request.set_tokens(Packed(tokens));
  v1::EvictReply reply;
  const absl::Status status = FromGrpc(stubs_->admin->Evict(&call, request, &reply), address_);
  return status.ok() ? absl::StatusOr<v1::EvictReply>(std::move(reply)) : status;
}

}  // namespace crumb
