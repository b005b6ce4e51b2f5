// SPDX-License-Identifier: Apache-2.0
//
// UcxWorker's peers: how they come, what they send, and how they go.
#include <ucp/api/ucp.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/transport/ucx_context.h"
#include "client/transport/ucx_worker.h"
#include "client/transport/ucx_worker_impl.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"

namespace crumb {

// A message on its way through OnMessage.
// NOLINTNEXTLINE(cppcoreguidelines-virtual-class-destructor): final, on the stack.
class UcxWorker::Impl::Arrival final : public UcxMessage {
 public:
  Arrival(Impl& worker,
          UcxPeerId peer,
          std::span<const std::byte> header,
          void* data,
          size_t bytes,
          bool is_rendezvous)
      : worker_(worker),
        peer_(peer),
        header_(header),
        data_(data),
        bytes_(bytes),
        is_rendezvous_(is_rendezvous) {}

  std::span<const std::byte> header() const override { return header_; }
  size_t payload_bytes() const override { return bytes_; }
  std::span<const std::byte> payload() const override {
    return {static_cast<const std::byte*>(data_), is_rendezvous_ ? 0 : bytes_};
  }
  void Receive(std::span<std::byte> target, UcxDone done) override {
    CRUMB_CHECK(target.size() == bytes_, "a target of the payload's size");
    CRUMB_CHECK(!taken_, "a payload is taken once");
    if (!is_rendezvous_) {
      std::copy_n(static_cast<const std::byte*>(data_), bytes_, target.data());
      done(absl::OkStatus());
      return;
    }
    taken_ = true;
    Transfer* transfer = worker_.Begin(peer_, std::move(done));
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.user_data = transfer;
    param.cb.recv_am = [](void* request, ucs_status_t status, size_t, void* received) {
      End(static_cast<Transfer*>(received), status);
      ucp_request_free(request);
    };
    void* request =
        ucp_am_recv_data_nbx(worker_.context_.worker(), data_, target.data(), bytes_, &param);
    if (!UCS_PTR_IS_PTR(request)) {
      End(transfer, UCS_PTR_STATUS(request));
    }
  }
  bool taken() const { return taken_; }

 private:
  Impl& worker_;
  const UcxPeerId peer_;
  const std::span<const std::byte> header_;
  void* const data_;
  const size_t bytes_;
  const bool is_rendezvous_;
  bool taken_ = false;
};

absl::StatusOr<uint16_t> UcxWorker::Impl::Listen(const std::string& host, uint16_t port) {
  CRUMB_CHECK(listener_ == nullptr, "one listener a worker");
  CRUMB_ASSIGN_OR_RETURN(const SocketAddress address, SocketAddress::Parse(host, port));
  ucp_listener_params_t params{};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr = address.ucs();
  params.conn_handler.cb = OnConnection;
  params.conn_handler.arg = this;
  CRUMB_RETURN_IF_ERROR(UcxStatus(ucp_listener_create(context_.worker(), &params, &listener_),
                                  absl::StrCat("listening on ", host, ":", port)));
  ucp_listener_attr_t attributes{};
  attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  CRUMB_RETURN_IF_ERROR(
      UcxStatus(ucp_listener_query(listener_, &attributes), "asking for the listener's port"));
  return SocketAddress::PortOf(attributes.sockaddr);
}

absl::StatusOr<UcxPeerId> UcxWorker::Impl::Connect(const std::string& host, uint16_t port) {
  CRUMB_ASSIGN_OR_RETURN(const SocketAddress address, SocketAddress::Parse(host, port));
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr = address.ucs();
  return AddPeer(params);
}

void UcxWorker::Impl::OnConnection(ucp_conn_request_h request, void* self) {
  Impl& worker = *static_cast<Impl*>(self);
  const UcxPeerId next(worker.last_peer_ + 1);
  if (!worker.handler_.OnPeer(next)) {
    ucp_listener_reject(worker.listener_, request);
    ++worker.last_peer_;
    return;
  }
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST;
  params.conn_request = request;
  // Fails when the peer has left already.
  if (const auto peer = worker.AddPeer(params); !peer.ok()) {
    worker.handler_.OnLost(next, peer.status());
  }
}

absl::StatusOr<UcxPeerId> UcxWorker::Impl::AddPeer(ucp_ep_params_t params) {
  const UcxPeerId id(++last_peer_);
  params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.arg = this;
  params.err_handler.cb = [](void* self, ucp_ep_h endpoint, ucs_status_t status) {
    static_cast<Impl*>(self)->MarkLost(endpoint, UcxStatus(status, "peer lost"));
  };
  ucp_ep_h endpoint = nullptr;
  CRUMB_RETURN_IF_ERROR(
      UcxStatus(ucp_ep_create(context_.worker(), &params, &endpoint), "connecting"));
  peers_[id] = {endpoint, absl::OkStatus(), 0, now_};
  by_endpoint_[endpoint] = id;
  return id;
}

void UcxWorker::Impl::MarkLost(ucp_ep_h endpoint, absl::Status reason) {
  if (const auto found = by_endpoint_.find(endpoint); found != by_endpoint_.end()) {
    Close(found->second, std::move(reason));
  }
}

void UcxWorker::Impl::Close(UcxPeerId peer, absl::Status reason) {
  const auto found = peers_.find(peer);
  if (found != peers_.end() && found->second.lost.ok()) {
    found->second.lost = reason.ok() ? absl::CancelledError("closed") : std::move(reason);
    any_lost_ = true;
  }
}

void UcxWorker::Impl::ForceClose(ucp_ep_h endpoint) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  param.cb.send = [](void* request, ucs_status_t, void*) { ucp_request_free(request); };
  ucp_ep_close_nbx(endpoint, &param);
}

void UcxWorker::Impl::Send(UcxPeerId peer,
                           std::span<const std::byte> header,
                           std::span<const std::byte> payload,
                           UcxSend how,
                           UcxDone done) {
  CRUMB_CHECK(header.size() <= kMaxHeaderBytes, "header of a message");
  const auto found = peers_.find(peer);
  if (found == peers_.end() || !found->second.lost.ok()) {
    done(absl::UnavailableError("UCX peer is gone"));
    return;
  }
  const ucp_ep_h endpoint = found->second.endpoint;
  Transfer* transfer = Begin(peer, std::move(done));
  std::copy(header.begin(), header.end(), transfer->header.begin());
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.user_data = transfer;
  param.cb.send = [](void* request, ucs_status_t status, void* sent) {
    End(static_cast<Transfer*>(sent), status);
    ucp_request_free(request);
  };
  // The reply flag tells the receiver by which endpoint the message came.
  param.flags = UCP_AM_SEND_FLAG_REPLY |
                (how == UcxSend::kRendezvous ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER);
  void* request = ucp_am_send_nbx(endpoint, kUcxMessageId, transfer->header.data(), header.size(),
                                  payload.data(), payload.size(), &param);
  if (!UCS_PTR_IS_PTR(request)) {
    End(transfer, UCS_PTR_STATUS(request));
  }
}

UcxWorker::Impl::Transfer* UcxWorker::Impl::Begin(UcxPeerId peer, UcxDone done) {
  if (const auto found = peers_.find(peer); found != peers_.end()) {
    ++found->second.in_flight;
    found->second.moved_at = now_;
  }
  ++num_transfers_;
  moved_at_ = now_;
  return new Transfer{this, peer, std::move(done), {}};
}

void UcxWorker::Impl::End(Transfer* transfer, ucs_status_t status) {
  const std::unique_ptr<Transfer> owned(transfer);
  Impl& worker = *owned->worker;
  if (const auto found = worker.peers_.find(owned->peer); found != worker.peers_.end()) {
    --found->second.in_flight;
    found->second.moved_at = worker.now_;
  }
  --worker.num_transfers_;
  worker.moved_at_ = worker.now_;
  owned->done(UcxStatus(status, "transfer"));
}

ucs_status_t UcxWorker::Impl::OnActiveMessage(void* self,
                                              const void* header,
                                              size_t header_bytes,
                                              void* data,
                                              size_t bytes,
                                              const ucp_am_recv_param_t* param) {
  Impl& worker = *static_cast<Impl*>(self);
  const auto found = (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0
                         ? worker.by_endpoint_.find(param->reply_ep)
                         : worker.by_endpoint_.end();
  if (found == worker.by_endpoint_.end()) {
    return UCS_OK;  // From a peer that was closed, or one that wants no answer: dropped.
  }
  Arrival arrival(worker, found->second, {static_cast<const std::byte*>(header), header_bytes},
                  data, bytes, (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0);
  worker.handler_.OnMessage(found->second, arrival);
  return arrival.taken() ? UCS_INPROGRESS : UCS_OK;
}

}  // namespace crumb
