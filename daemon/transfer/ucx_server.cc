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
  CRUMB_ASSIGN_OR_RETURN(
      server->sender_,
      PullSender::Create(options.pulls, [raw = server.get()](PullSender::Ready ready) {
        raw->SendChunk(std::move(ready));
      }));
  UcxOptions ucx = options.ucx;
  ucx.nap = options.nap;
  CRUMB_ASSIGN_OR_RETURN(server->worker_, UcxWorker::Create(ucx, *server, clock));
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
  // The gathering thread first: it posts to the worker. Transfers that end later still find the
  // sender.
  if (sender_ != nullptr) {
    sender_->Stop();
  }
  worker_.reset();
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
  sender_->CancelAll(peer);
  peers_.erase(peer);
  stats_.peers = peers_.size();
  ++stats_.lost_peers;
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
    from.pulls.erase(cancel->preamble.request_id);
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
  const size_t total_bytes = plan.total_bytes();
  CRUMB_RETURN_IF_ERROR(sender_->Add(id, request, std::move(plan), std::move(guard)));
  peer.pulls[request.preamble.request_id] = {total_bytes, 0, clock_.Now()};
  ++stats_.pulls;
  return absl::OkStatus();
}

void UcxServer::OnSent(UcxPeerId peer,
                       uint64_t request_id,
                       size_t bytes,
                       const absl::Status& status) {
  sender_->Ended(peer);
  if (!status.ok()) {
    return;  // The peer is lost, or about to be.
  }
  stats_.sent_bytes += bytes;
  const auto found = peers_.find(peer);
  if (found == peers_.end()) {
    return;
  }
  const auto pull = found->second.pulls.find(request_id);
  if (pull == found->second.pulls.end()) {
    return;  // Cancelled.
  }
  pull->second.arrived_bytes += bytes;
  if (pull->second.arrived_bytes == pull->second.total_bytes) {
    observer_.OnPulled(pull->second.total_bytes, clock_.Now() - pull->second.started_at);
    found->second.pulls.erase(pull);
  }
}

void UcxServer::SendChunk(PullSender::Ready ready) {
  const UcxPeerId peer = ready.peer;
  const absl::Status posted = worker_->Post([this, peer, ready = std::move(ready)]() mutable {
    const std::span<const std::byte> payload = ready.payload;
    const ChunkMessage message = ready.message;
    worker_->Send(peer, WireBytes(message), payload, UcxSend::kRendezvous,
                  [this, ready = std::move(ready)](const absl::Status& status) mutable {
                    { const auto given_back = std::move(ready.memory); }
                    OnSent(ready.peer, ready.message.preamble.request_id, ready.payload.size(),
                           status);
                  });
  });
  if (!posted.ok()) {
    // The worker takes no more, so neither will the peer; the chunk is back already.
    sender_->CancelAll(peer);
    sender_->Ended(peer);
  }
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
