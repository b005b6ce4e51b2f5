// SPDX-License-Identifier: Apache-2.0
#include "daemon/rpc/grpc_server.h"

#include <grpc/grpc.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/health_check_service_interface.h"

#include "daemon/rpc/admin_service.h"
#include "daemon/rpc/cache_service.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

// The largest message is an AttachRequest with its profile file; tokens take 4 MiB at most.
constexpr int kMaxMessageBytes = static_cast<int>(kMaxProfileFileBytes) + (1 << 20);
// Prompts of 100,000 tokens and more come in one frame, within the window that is open from the
// start: neither is cut up, and no sender waits for a round trip to go on.
constexpr int kMaxFrameBytes = 1 << 20;
constexpr int kStreamWindowBytes = 4 << 20;
// Of messages that are being received or sent, all calls together; calls wait for room.
constexpr size_t kMaxBufferedBytes = size_t{2} << 30;

// The mode of files that are made while this lives.
class ScopedUmask {
 public:
  explicit ScopedUmask(mode_t mask) : before_(umask(mask)) {}
  ~ScopedUmask() { umask(before_); }
  ScopedUmask(const ScopedUmask&) = delete;
  ScopedUmask& operator=(const ScopedUmask&) = delete;

 private:
  const mode_t before_;
};

void Configure(grpc::ServerBuilder& builder, absl::Duration lease) {
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  // Two daemons must not share one port.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // A peer that is silent for the time of a lease is gone, and its session with it. One that runs
  // answers pings at any time.
  const auto half_lease_ms =
      static_cast<int>(std::clamp<int64_t>(absl::ToInt64Milliseconds(lease / 2), 100, 60000));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, half_lease_ms);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, half_lease_ms);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kMaxFrameBytes);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kStreamWindowBytes);
  builder.SetResourceQuota(grpc::ResourceQuota("crumbd").Resize(kMaxBufferedBytes));
}

}  // namespace

class GrpcServer::Impl {
 public:
  explicit Impl(RpcContext& context) : context_(context), cache_(context), admin_(context) {}

  absl::Status Start(const GrpcOptions& options) {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    grpc::ServerBuilder builder;
    Configure(builder, context_.store.options().lease);
    int unix_result = 0;
    builder.AddListeningPort(absl::StrCat("unix:", options.unix_socket),
                             grpc::InsecureServerCredentials(), &unix_result);
    if (!options.tcp.empty()) {
      builder.AddListeningPort(options.tcp, grpc::InsecureServerCredentials(), &tcp_port_);
    }
    builder.RegisterService(&cache_);
    builder.RegisterService(&admin_);
    {
      const ScopedUmask mask(static_cast<mode_t>(0777 & ~options.unix_socket_mode));
      server_ = builder.BuildAndStart();
    }
    if (server_ == nullptr || unix_result == 0 || (!options.tcp.empty() && tcp_port_ == 0)) {
      const bool is_tcp = unix_result != 0 && !options.tcp.empty();
      server_.reset();
      return absl::UnavailableError(
          is_tcp ? absl::StrCat("TCP address ", options.tcp,
                                " cannot be listened on (in use, or not this machine's): free it, "
                                "or set another by [listen] tcp")
                 : absl::StrCat("Unix socket ", options.unix_socket,
                                " cannot be listened on: check that its directory exists and is "
                                "writable, or set another by [listen] unix_socket"));
    }
    if (chmod(options.unix_socket.c_str(), options.unix_socket_mode) != 0) {
      return absl::UnavailableError(absl::StrCat("chmod of Unix socket ", options.unix_socket, ": ",
                                                 std::generic_category().message(errno)));
    }
    return absl::OkStatus();
  }

  void SetDraining() {
    server_->GetHealthCheckService()->SetServingStatus(false);
    cache_.SetDraining();
  }

  void Shutdown(absl::Duration grace) {
    if (server_ != nullptr) {
      cache_.EndSessions();  // Else they would be cancelled at the end of the grace, unexplained.
      server_->Shutdown(absl::ToChronoTime(absl::Now() + grace));
      server_.reset();
    }
  }

 private:
  friend class GrpcServer;

  RpcContext& context_;
  CacheService cache_;
  AdminService admin_;
  int tcp_port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

GrpcServer::GrpcServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

GrpcServer::~GrpcServer() {
  Shutdown(absl::ZeroDuration());
}

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Create(const GrpcOptions& options,
                                                               RpcContext& context) {
  auto impl = std::make_unique<Impl>(context);
  CRUMB_RETURN_IF_ERROR(impl->Start(options));
  return std::unique_ptr<GrpcServer>(new GrpcServer(std::move(impl)));
}

uint16_t GrpcServer::tcp_port() const {
  return static_cast<uint16_t>(impl_->tcp_port_);
}

void GrpcServer::SetDraining() {
  impl_->SetDraining();
}

void GrpcServer::Shutdown(absl::Duration grace) {
  impl_->Shutdown(grace);
}

}  // namespace crumb
