// SPDX-License-Identifier: Apache-2.0
#include "client/transport/ucx_worker.h"

#include <poll.h>
#include <pthread.h>
#include <ucp/api/ucp.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

#include "client/transport/ucx_context.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

constexpr unsigned kMessageId = 1;  // Of the one active message that everything travels in.
// UCX 1.13.1 was once seen to sleep through an event, so no sleep is long while bytes are moving.
constexpr int kBusySleepMs = 5;
constexpr int kIdleSleepMs = 100;
constexpr absl::Duration kTickInterval = absl::Milliseconds(1);
constexpr absl::Duration kDrainTimeout = absl::Seconds(3);
// Rounds of progress before posted tasks get their turn.
constexpr int kMaxProgress = 64;

}  // namespace

// Everything but Post, Call and the constructor runs on thread_.
class UcxWorker::Impl {
 public:
  Impl(UcxContext context, const UcxOptions& options, Handler& handler, const Clock& clock)
      : options_(options), handler_(handler), clock_(clock), context_(std::move(context)) {}

  absl::Status Start();
  void Stop();
  absl::Status Post(absl::AnyInvocable<void()> task);
  absl::StatusOr<uint16_t> Listen(const std::string& host, uint16_t port);
  absl::StatusOr<UcxPeerId> Connect(const std::string& host, uint16_t port);
  void Send(UcxPeerId peer,
            std::span<const std::byte> header,
            std::span<const std::byte> payload,
            UcxSend how,
            UcxDone done);
  void Close(UcxPeerId peer, absl::Status reason);
  bool OnOwnThread() const { return std::this_thread::get_id() == thread_.get_id(); }

 private:
  struct Peer {
    ucp_ep_h endpoint = nullptr;
    absl::Status lost;  // Not OK: to be closed in the next round, for this reason.
    uint32_t in_flight = 0;
    absl::Time moved_at;  // When a transfer began or ended last.
  };
  // Given to UCX with a request, taken back by its callback.
  struct Transfer {
    Impl* worker;
    UcxPeerId peer;
    UcxDone done;
    std::array<std::byte, kMaxHeaderBytes> header;
  };
  class Arrival;  // NOLINT(cppcoreguidelines-virtual-class-destructor): as below.

  void Run();
  bool RunPosted();
  void Tick();
  void CloseLost();
  void Sleep();
  void Drain();
  absl::StatusOr<UcxPeerId> AddPeer(ucp_ep_params_t params);
  void ForceClose(ucp_ep_h endpoint);
  void MarkLost(ucp_ep_h endpoint, absl::Status reason);
  Transfer* Begin(UcxPeerId peer, UcxDone done);
  static void End(Transfer* transfer, ucs_status_t status);
  void Log(std::string_view text) const;
  static void OnConnection(ucp_conn_request_h request, void* self);
  static ucs_status_t OnActiveMessage(void* self,
                                      const void* header,
                                      size_t header_bytes,
                                      void* data,
                                      size_t bytes,
                                      const ucp_am_recv_param_t* param);

  const UcxOptions options_;
  Handler& handler_;
  const Clock& clock_;
  UcxContext context_;
  std::thread thread_;

  absl::Mutex mutex_;
  std::deque<absl::AnyInvocable<void()>> posted_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  // Confined to thread_.
  ucp_listener_h listener_ = nullptr;
  std::unordered_map<UcxPeerId, Peer> peers_;
  std::unordered_map<ucp_ep_h, UcxPeerId> by_endpoint_;
  uint64_t last_peer_ = 0;
  uint64_t num_transfers_ = 0;
  bool any_lost_ = false;
  absl::Time now_;
  absl::Time ticked_at_ = absl::InfinitePast();
};

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

absl::Status UcxWorker::Impl::Start() {
  ucp_am_handler_param_t params{};
  params.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                      UCP_AM_HANDLER_PARAM_FIELD_ARG;
  params.id = kMessageId;
  params.cb = OnActiveMessage;
  params.arg = this;
  CRUMB_RETURN_IF_ERROR(UcxStatus(ucp_worker_set_am_recv_handler(context_.worker(), &params),
                                  "registering the message handler"));
  now_ = clock_.Now();
  thread_ = std::thread([this] { Run(); });
  pthread_setname_np(thread_.native_handle(), options_.thread_name.substr(0, 15).c_str());
  return absl::OkStatus();
}

void UcxWorker::Impl::Stop() {
  {
    const absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  ucp_worker_signal(context_.worker());
  thread_.join();
}

absl::Status UcxWorker::Impl::Post(absl::AnyInvocable<void()> task) {
  {
    const absl::MutexLock lock(&mutex_);
    if (stopping_) {
      return absl::UnavailableError("UCX worker is ending");
    }
    if (posted_.size() >= options_.max_posted) {
      return absl::ResourceExhaustedError(
          absl::StrCat("UCX worker has ", posted_.size(), " tasks waiting, its limit; retry"));
    }
    posted_.push_back(std::move(task));
  }
  // Ends a sleep, or has the next attempt at one report work.
  return UcxStatus(ucp_worker_signal(context_.worker()), "waking the worker");
}

void UcxWorker::Impl::Run() {
  while (RunPosted()) {
    int rounds = 0;
    while (rounds < kMaxProgress && ucp_worker_progress(context_.worker()) != 0) {
      ++rounds;
    }
    now_ = clock_.Now();
    if (now_ - ticked_at_ >= kTickInterval || now_ < ticked_at_) {
      ticked_at_ = now_;
      Tick();
    }
    CloseLost();
    if (rounds == 0) {
      Sleep();
    }
  }
  Drain();
}

bool UcxWorker::Impl::RunPosted() {
  std::deque<absl::AnyInvocable<void()>> tasks;
  {
    const absl::MutexLock lock(&mutex_);
    tasks.swap(posted_);
    if (tasks.empty() && stopping_) {
      return false;
    }
  }
  for (absl::AnyInvocable<void()>& task : tasks) {
    task();
  }
  return true;
}

void UcxWorker::Impl::Tick() {
  for (auto& [id, peer] : peers_) {
    if (peer.in_flight > 0 && now_ > peer.moved_at + options_.stall_timeout && peer.lost.ok()) {
      peer.lost = absl::UnavailableError(
          absl::StrCat("UCX peer: ", peer.in_flight, " transfers have not moved for ",
                       absl::FormatDuration(options_.stall_timeout), "; it is stopped or cut off"));
      any_lost_ = true;
    }
  }
  handler_.OnTick(now_);
}

void UcxWorker::Impl::CloseLost() {
  if (!std::exchange(any_lost_, false)) {
    return;
  }
  std::vector<std::pair<UcxPeerId, Peer>> lost;
  for (const auto& [id, peer] : peers_) {
    if (!peer.lost.ok()) {
      lost.emplace_back(id, peer);
    }
  }
  for (const auto& [id, peer] : lost) {
    peers_.erase(id);
    by_endpoint_.erase(peer.endpoint);
    ForceClose(peer.endpoint);
    handler_.OnLost(id, peer.lost);
  }
}

void UcxWorker::Impl::Sleep() {
  if (ucp_worker_arm(context_.worker()) != UCS_OK) {
    return;  // Something came in meanwhile.
  }
  pollfd wake{context_.event_fd(), POLLIN, 0};
  poll(&wake, 1, num_transfers_ > 0 ? kBusySleepMs : kIdleSleepMs);
}

void UcxWorker::Impl::Drain() {
  if (listener_ != nullptr) {
    ucp_listener_destroy(listener_);
  }
  for (const auto& [id, peer] : peers_) {
    ForceClose(peer.endpoint);
  }
  peers_.clear();
  by_endpoint_.clear();
  const ucp_request_param_t param{};
  void* flush = ucp_worker_flush_nbx(context_.worker(), &param);
  const absl::Time end = clock_.Now() + kDrainTimeout;
  while (clock_.Now() < end && (UCS_PTR_IS_PTR(flush) || num_transfers_ > 0)) {
    ucp_worker_progress(context_.worker());
    if (UCS_PTR_IS_PTR(flush) && ucp_request_check_status(flush) != UCS_INPROGRESS) {
      ucp_request_free(flush);
      flush = nullptr;
    }
  }
  if (UCS_PTR_IS_PTR(flush) || num_transfers_ > 0) {
    Log(absl::StrCat("UCX worker: ", num_transfers_, " transfers have not ended ",
                     absl::FormatDuration(kDrainTimeout),
                     " after their peers were closed; leaking the worker and their memory"));
    context_.Leak();
  }
}

void UcxWorker::Impl::Log(std::string_view text) const {
  if (options_.log) {
    options_.log(text);
  }
}

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
  void* request = ucp_am_send_nbx(endpoint, kMessageId, transfer->header.data(), header.size(),
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

absl::StatusOr<std::unique_ptr<UcxWorker>> UcxWorker::Create(const UcxOptions& options,
                                                             Handler& handler,
                                                             const Clock& clock) {
  CRUMB_ASSIGN_OR_RETURN(UcxContext context, UcxContext::Open(options));
  auto impl = std::make_unique<Impl>(std::move(context), options, handler, clock);
  CRUMB_RETURN_IF_ERROR(impl->Start());
  return std::unique_ptr<UcxWorker>(new UcxWorker(std::move(impl)));
}

UcxWorker::UcxWorker(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

UcxWorker::~UcxWorker() {
  CRUMB_CHECK(!impl_->OnOwnThread(), "a worker is not destroyed on its own thread");
  impl_->Stop();
}

absl::Status UcxWorker::Post(absl::AnyInvocable<void()> task) {
  return impl_->Post(std::move(task));
}

absl::Status UcxWorker::Call(absl::AnyInvocable<absl::Status()> task) {
  CRUMB_CHECK(!impl_->OnOwnThread(), "Call would wait for itself");
  absl::Status result;
  absl::Notification ended;
  CRUMB_RETURN_IF_ERROR(impl_->Post([&] {
    result = task();
    ended.Notify();
  }));
  ended.WaitForNotification();
  return result;
}

absl::StatusOr<uint16_t> UcxWorker::Listen(const std::string& host, uint16_t port) {
  return impl_->Listen(host, port);
}

absl::StatusOr<UcxPeerId> UcxWorker::Connect(const std::string& host, uint16_t port) {
  return impl_->Connect(host, port);
}

void UcxWorker::Send(UcxPeerId peer,
                     std::span<const std::byte> header,
                     std::span<const std::byte> payload,
                     UcxSend how,
                     UcxDone done) {
  impl_->Send(peer, header, payload, how, std::move(done));
}

void UcxWorker::Close(UcxPeerId peer, absl::Status reason) {
  impl_->Close(peer, std::move(reason));
}

}  // namespace crumb
