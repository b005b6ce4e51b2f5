// SPDX-License-Identifier: Apache-2.0
//
// The inside of UcxWorker: ucx_worker.cc has its thread, ucx_messages.cc its peers and what they
// send.
#pragma once

#include <ucp/api/ucp.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "client/transport/ucx_context.h"
#include "client/transport/ucx_worker.h"
#include "proto/base/clock.h"

namespace crumb {

inline constexpr unsigned kUcxMessageId =
    1;  // Of the one active message that everything travels in.

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
  class Arrival;  // NOLINT(cppcoreguidelines-virtual-class-destructor): final, on the stack.

  void Run();
  bool RunPosted();
  void Tick();
  void CloseLost();
  void Sleep();
  void Nap();
  bool HasTasks() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stopping_ || !posted_.empty(); }
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
  absl::Time moved_at_ = absl::InfinitePast();  // When a transfer of any peer began or ended last.
  bool any_lost_ = false;
  absl::Time now_;
  absl::Time ticked_at_ = absl::InfinitePast();
};

}  // namespace crumb
