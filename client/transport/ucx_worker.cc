// SPDX-License-Identifier: Apache-2.0
#include "client/transport/ucx_worker.h"

#include <poll.h>
#include <pthread.h>
#include <ucp/api/ucp.h>

#include <deque>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

#include "client/transport/ucx_context.h"
#include "client/transport/ucx_worker_impl.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

// UCX 1.13.1 was once seen to sleep through an event, so no sleep is long while bytes are moving.
constexpr int kBusySleepMs = 5;
constexpr int kIdleSleepMs = 100;
// When nothing has moved for so long, the other end is not busy with it: then events wake us.
constexpr absl::Duration kMaxNapping = absl::Milliseconds(5);
constexpr absl::Duration kTickInterval = absl::Milliseconds(1);
constexpr absl::Duration kDrainTimeout = absl::Seconds(3);
// Rounds of progress before posted tasks get their turn.
constexpr int kMaxProgress = 64;

}  // namespace

absl::Status UcxWorker::Impl::Start() {
  ucp_am_handler_param_t params{};
  params.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                      UCP_AM_HANDLER_PARAM_FIELD_ARG;
  params.id = kUcxMessageId;
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
    const bool has_more = handler_.OnTurn();
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
    if (rounds == 0 && !has_more) {
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

void UcxWorker::Impl::Nap() {
  const absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithTimeout(absl::Condition(this, &Impl::HasTasks), options_.nap);
}

void UcxWorker::Impl::Sleep() {
  if (options_.nap > absl::ZeroDuration() && num_transfers_ > 0 && now_ - moved_at_ < kMaxNapping) {
    Nap();
    return;
  }
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
