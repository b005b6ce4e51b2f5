// SPDX-License-Identifier: Apache-2.0
//
// The daemon's end of the UCX data plane: pages under a lease leave by rendezvous, pages of open
// publishes come in. See proto/wire/pull_message.h for what is said, docs/decisions/006*.md for
// why.
//
// A connection belongs to the session whose id and secret its first message proves. Each pull
// checks session, lease and generations in the store when it starts; its pages are held until they
// have been sent, or the connection has been closed and its transfers have ended. When a session
// ends, its connection is closed.
//
// UCX's own ports have no authentication, and 1.13.1 aborts on bytes that look like UCX's: listen
// only where every process is trusted as the daemon is. Loopback by default, and off by default.
//
// Thread-safe. Owns a thread, the worker's, on which pulls are served.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "client/transport/ucx_worker.h"
#include "daemon/store/page_store.h"
#include "daemon/transfer/data_plane.h"
#include "daemon/transfer/pull_sender.h"
#include "daemon/transfer/session_table.h"
#include "daemon/transfer/stage_area.h"
#include "proto/base/clock.h"
#include "proto/wire/pull_message.h"

namespace crumb {

struct UcxServerOptions {
  std::string host = "127.0.0.1";  // Numeric address to listen on.
  uint16_t port = 0;               // 0: any free one.
  UcxOptions ucx;
  PullSender::Options pulls;
  StageArea::Options staging;
  uint32_t max_peers = 1024;
  // A connection that has not said hello by then is closed.
  absl::Duration hello_timeout = absl::Seconds(10);
};

// Since the start; read without a lock, so not of one moment.
struct UcxServerStats {
  std::atomic<uint64_t> peers{0};  // Connected now.
  std::atomic<uint64_t> pulls{0};
  std::atomic<uint64_t> refused{0};     // Hellos, pulls and publishes.
  std::atomic<uint64_t> sent_bytes{0};  // Whose transfers ended well.
  std::atomic<uint64_t> received_bytes{0};
  std::atomic<uint64_t> lost_peers{0};  // With transfers under way or not.
};

class UcxServer final : public UcxDataPlane, private UcxWorker::Handler {
 public:
  // Listens and serves. The store, the sessions, the observer and the clock must outlive the
  // server. UNAVAILABLE: the port is in use, or UCX lacks the transports or devices;
  // INVALID_ARGUMENT names the option.
  static absl::StatusOr<std::unique_ptr<UcxServer>> Create(const UcxServerOptions& options,
                                                           PageStore& store,
                                                           const SessionTable& sessions,
                                                           TransferObserver& observer,
                                                           const Clock& clock = Clock::System());
  UcxServer(const UcxServer&) = delete;
  UcxServer& operator=(const UcxServer&) = delete;
  ~UcxServer() override;

  UcxEndpoint endpoint() const override;
  // shared: see StagingMemory.
  absl::StatusOr<std::shared_ptr<const StagingMemory>> Staging(SessionId session,
                                                               PublishId publish) override;
  void DropStaging(SessionId session) override;
  void DropStaging(SessionId session, PublishId publish) override;
  const UcxServerStats& stats() const { return stats_; }
  size_t staging_bytes() const { return staging_.used_bytes(); }

  std::string Description() const override;
  void Stop() override;

 private:
  struct Peer {
    SessionId session;  // 0: has not said hello.
    SessionSecret secret{};
    uint64_t group = 0;  // See HelloMessage.
    absl::Time connected_at;
  };

  UcxServer(const UcxServerOptions& options,
            PageStore& store,
            const SessionTable& sessions,
            TransferObserver& observer,
            const Clock& clock);

  // On the worker's thread.
  bool OnPeer(UcxPeerId peer) override;
  void OnMessage(UcxPeerId peer, UcxMessage& message) override;
  void OnLost(UcxPeerId peer, const absl::Status& reason) override;
  bool OnTurn() override;
  void OnTick(absl::Time now) override;
  void OnHello(UcxPeerId peer, const HelloMessage& hello);
  absl::Status StartPull(UcxPeerId id,
                         Peer& peer,
                         const PullMessage& request,
                         std::span<const std::byte> payload);
  void OnSent(const PullSender::Ready& sent, const absl::Status& status);
  // All connections of the peer's session and group, itself first.
  std::vector<UcxPeerId> GroupOf(UcxPeerId peer) const;
  void OnStage(UcxPeerId peer, SessionId session, const StageMessage& stage, UcxMessage& message);
  void SendEnd(UcxPeerId peer, uint64_t request_id, const absl::Status& status);
  void SendChunk(PullSender::Ready ready);

  const UcxServerOptions options_;
  PageStore& store_;
  const SessionTable& sessions_;
  TransferObserver& observer_;
  const Clock& clock_;
  uint16_t port_ = 0;
  UcxServerStats stats_;
  StageArea staging_;

  // Confined to the worker's thread.
  std::optional<PullSender> sender_;
  std::unordered_map<UcxPeerId, Peer> peers_;
  absl::Time checked_at_ = absl::InfinitePast();
  // Whose peers are to be told. shared: see PullSender::Ready.
  std::vector<std::shared_ptr<PullSender::Progress>> failed_;
  bool may_send_ = false;  // The sender is to be asked for messages.

  std::unique_ptr<UcxWorker> worker_;  // Null once stopped.
};

}  // namespace crumb
