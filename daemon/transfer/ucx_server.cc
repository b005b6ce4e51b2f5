// SPDX-License-Identifier: Apache-2.0
#include "daemon/transfer/ucx_server.h"

#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"

#include "proto/base/status_macros.h"

namespace crumb {
namespace {

// Between looks at whether the sessions of the connections still exist.
constexpr absl::Duration kCheckInterval = absl::Milliseconds(200);

// What was asked for is what the store holds.
absl::Status CheckPages(std::span<const PullEntry> entries,
                        std::span<const PinnedPage> pages,
                        const Geometry& geometry) {
  for (size_t idx = 0; idx < entries.size(); ++idx) {
    const PinnedPage& page = pages[idx];
    if (page.header.generation != entries[idx].generation) {
      return absl::FailedPreconditionError(absl::StrCat(
          "page ", entries[idx].page_idx, " is of generation ", page.header.generation,
          ", the pull asks for ", entries[idx].generation, "; look the prefix up again"));
    }
    const size_t expected = geometry.PageBytes(page.key.encoding);
    if (page.bytes.size() != expected) {
      return absl::InvalidArgumentError(absl::StrCat(
          "page ", entries[idx].page_idx, " has ", page.bytes.size(),
          " bytes of this session's heads, by the pull's geometry it would have ", expected));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<UcxServer>> UcxServer::Create(const UcxServerOptions& options,
                                                             PageStore& store,
                                                             const SessionTable& sessions,
                                                             TransferObserver& observer,
                                                             const Clock& clock) {
  std::unique_ptr<UcxServer> server(new UcxServer(options, store, sessions, observer, clock));
  CRUMB_ASSIGN_OR_RETURN(PullSender sender, PullSender::Create(options.pulls));
  server->sender_.emplace(std::move(sender));
  CRUMB_ASSIGN_OR_RETURN(server->worker_, UcxWorker::Create(options.ucx, *server, clock));
  absl::StatusOr<uint16_t> port;
  CRUMB_RETURN_IF_ERROR(server->worker_->Call([&] {
    port = server->worker_->Listen(options.host, options.port);
    return port.status();
  }));
  server->port_ = *port;
  return server;
}

UcxServer::UcxServer(const UcxServerOptions& options,
                     PageStore& store,
                     const SessionTable& sessions,
                     TransferObserver& observer,
                     const Clock& clock)
    : options_(options),
      store_(store),
      sessions_(sessions),
      observer_(observer),
      clock_(clock),
      staging_(options.staging, clock) {}

UcxServer::~UcxServer() {
  Stop();
}

void UcxServer::Stop() {
  worker_.reset();
  sender_.reset();  // With the pages that it holds. Transfers that ended meanwhile told it so.
}

UcxEndpoint UcxServer::endpoint() const {
  return {options_.host, port_, UcxVersion()};
}

std::string UcxServer::Description() const {
  return absl::StrCat("UCX ", UcxVersion(), " at ", options_.host, ":", port_, " by ",
                      options_.ucx.transports, " on ", options_.ucx.devices);
}

// shared: see StagingMemory.
absl::StatusOr<std::shared_ptr<const StagingMemory>> UcxServer::Staging(SessionId session,
                                                                        PublishId publish) {
  return staging_.Find(session, publish);
}

void UcxServer::DropStaging(SessionId session) {
  staging_.DropSession(session);
}

void UcxServer::DropStaging(SessionId session, PublishId publish) {
  staging_.Drop(session, publish);
}

bool UcxServer::OnPeer(UcxPeerId peer) {
  if (peers_.size() >= options_.max_peers) {
    ++stats_.refused;
    return false;
  }
  peers_[peer].connected_at = clock_.Now();
  stats_.peers = peers_.size();
  return true;
}

void UcxServer::OnLost(UcxPeerId peer, const absl::Status&) {
  sender_->Forget(peer);
  peers_.erase(peer);
  stats_.peers = peers_.size();
  ++stats_.lost_peers;
}

bool UcxServer::OnTurn() {
  // Not in the callback that told of it: UCX 1.13.1 aborts ("tcp_iface.c:307 Assertion
  // ep->conn_state != CLOSED") when a send finds another connection of a killed client broken.
  for (const auto& pull : std::exchange(failed_, {})) {
    sender_->Cancel(pull->asked_by, pull->request_id);
    SendEnd(pull->asked_by, pull->request_id,
            absl::UnavailableError("a connection of the pull is lost"));
  }
  while (may_send_) {
    std::optional<PullSender::Ready> ready = sender_->Next();
    if (!ready.has_value()) {
      may_send_ = false;
      return false;
    }
    const bool took_long = ready->is_copy();
    SendChunk(*std::move(ready));
    if (took_long) {
      return true;
    }
  }
  return false;
}

void UcxServer::OnTick(absl::Time now) {
  if (now < checked_at_ + kCheckInterval) {
    return;
  }
  checked_at_ = now;
  staging_.Tick(now);
  for (const auto& [id, peer] : peers_) {
    if (peer.session == SessionId()) {
      if (now > peer.connected_at + options_.hello_timeout) {
        worker_->Close(id, absl::DeadlineExceededError("no hello"));
      }
    } else if (absl::Status status = sessions_.Authenticate(peer.session, peer.secret);
               !status.ok()) {
      staging_.DropSession(peer.session);
      worker_->Close(id, std::move(status));
    }
  }
}

void UcxServer::OnMessage(UcxPeerId peer, UcxMessage& message) {
  const auto found = peers_.find(peer);
  const absl::StatusOr<DataPlaneMessage> decoded = DecodeMessage(message.header());
  if (found == peers_.end() || !decoded.ok()) {
    worker_->Close(peer, decoded.status());
    return;
  }
  if (const auto* hello = std::get_if<HelloMessage>(&*decoded)) {
    OnHello(peer, *hello);
    return;
  }
  Peer& from = found->second;
  if (from.session == SessionId()) {
    ++stats_.refused;
    worker_->Close(peer, absl::PermissionDeniedError("a request before the hello"));
  } else if (const auto* pull = std::get_if<PullMessage>(&*decoded)) {
    if (const absl::Status status = StartPull(peer, from, *pull, message.payload()); !status.ok()) {
      ++stats_.refused;
      SendEnd(peer, pull->preamble.request_id, status);
    }
  } else if (const auto* cancel = std::get_if<CancelMessage>(&*decoded)) {
    sender_->Cancel(peer, cancel->preamble.request_id);
  } else if (const auto* stage = std::get_if<StageMessage>(&*decoded)) {
    OnStage(peer, from.session, *stage, message);
  } else {
    worker_->Close(peer, absl::InvalidArgumentError("a message that only daemons send"));
  }
}

void UcxServer::OnHello(UcxPeerId peer, const HelloMessage& hello) {
  Peer& state = peers_[peer];
  absl::Status status =
      state.session == SessionId()
          ? sessions_.Authenticate(SessionId(hello.session_id), hello.session_secret)
          : absl::FailedPreconditionError("a second hello");
  if (status.ok()) {
    state.session = SessionId(hello.session_id);
    state.secret = hello.session_secret;
    state.group = hello.group;
    SendEnd(peer, hello.preamble.request_id, status);
    return;
  }
  ++stats_.refused;
  // Closed once the answer has left.
  const EndMessage end = MakeEnd(hello.preamble.request_id, status);
  worker_->Send(peer, WireBytes(end), {}, UcxSend::kCopy, [this, peer](const absl::Status&) {
    worker_->Close(peer, absl::PermissionDeniedError("hello refused"));
  });
}

absl::Status UcxServer::StartPull(UcxPeerId id,
                                  Peer& peer,
                                  const PullMessage& request,
                                  std::span<const std::byte> payload) {
  CRUMB_ASSIGN_OR_RETURN(const std::vector<PullEntry> entries, DecodeEntries(request, payload));
  std::vector<PageKey> keys;
  std::vector<PageEncoding> encodings;
  keys.reserve(entries.size());
  encodings.reserve(entries.size());
  for (const PullEntry& entry : entries) {
    keys.push_back({PageIdx(entry.page_idx), entry.encoding});
    encodings.push_back(entry.encoding);
  }
  CRUMB_ASSIGN_OR_RETURN(ReadGuard guard,
                         store_.BeginRead(peer.session, LeaseId(request.lease_id), keys));
  CRUMB_RETURN_IF_ERROR(CheckPages(entries, guard.pages(), request.geometry));
  PullPlan plan(request.geometry, std::move(encodings),
                {request.ordered_layers, request.chunk_bytes});
  CRUMB_RETURN_IF_ERROR(
      sender_->Add(GroupOf(id), request, std::move(plan), std::move(guard), clock_.Now()));
  may_send_ = true;
  ++stats_.pulls;
  return absl::OkStatus();
}

std::vector<UcxPeerId> UcxServer::GroupOf(UcxPeerId peer) const {
  const Peer& asking = peers_.at(peer);
  std::vector<UcxPeerId> group = {peer};
  for (const auto& [id, other] : peers_) {
    if (id != peer && other.session == asking.session && other.group == asking.group) {
      group.push_back(id);
    }
  }
  return group;
}

void UcxServer::OnSent(const PullSender::Ready& sent, const absl::Status& status) {
  sender_->Ended(sent.peer, sent.payload.size());
  may_send_ = true;
  PullSender::Progress& pull = *sent.progress;
  if (!status.ok()) {
    // The peer is lost, or about to be. Another of its group may not be.
    if (!std::exchange(pull.has_failed, true)) {
      failed_.push_back(sent.progress);
    }
    return;
  }
  stats_.sent_bytes += sent.payload.size();
  pull.arrived_bytes += sent.payload.size();
  if (pull.arrived_bytes == pull.total_bytes) {
    observer_.OnPulled(pull.total_bytes, clock_.Now() - pull.started_at);
  }
}

void UcxServer::SendChunk(PullSender::Ready ready) {
  const UcxPeerId peer = ready.peer;
  const std::span<const std::byte> payload = ready.payload;
  const ChunkMessage message = ready.message;
  worker_->Send(peer, WireBytes(message), payload, UcxSend::kRendezvous,
                [this, ready = std::move(ready)](const absl::Status& status) mutable {
                  { const auto given_back = std::move(ready.memory); }
                  OnSent(ready, status);
                });
}

void UcxServer::OnStage(UcxPeerId peer,
                        SessionId session,
                        const StageMessage& stage,
                        UcxMessage& message) {
  const uint64_t request_id = stage.preamble.request_id;
  absl::StatusOr<StageArea::Place> place =
      staging_.Reserve(session, stage, message.payload_bytes());
  if (!place.ok()) {
    ++stats_.refused;
    SendEnd(peer, request_id, place.status());
    return;
  }
  const std::span<std::byte> target = place->bytes;
  message.Receive(
      target, [this, peer, session, stage, place = *std::move(place)](const absl::Status& status) {
        if (!status.ok()) {
          staging_.Drop(session, PublishId(stage.publish_id));
          return;
        }
        stats_.received_bytes += place.bytes.size();
        if (const auto landing = staging_.Landed(place); landing.has_value()) {
          observer_.OnPushed(landing->bytes, landing->duration);
          SendEnd(peer, stage.preamble.request_id, absl::OkStatus());
        }
      });
}

void UcxServer::SendEnd(UcxPeerId peer, uint64_t request_id, const absl::Status& status) {
  const EndMessage end = MakeEnd(request_id, status);
  worker_->Send(peer, WireBytes(end), {}, UcxSend::kCopy, [](const absl::Status&) {});
}

}  // namespace crumb
