// SPDX-License-Identifier: Apache-2.0
#include "client/transport/ucx_link.h"

#include <algorithm>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"

#include "proto/base/status_macros.h"

namespace crumb {
namespace {

absl::Status CheckSession(const SessionInfo& session) {
  if (session.ucx_host.empty()) {
    return absl::UnavailableError(
        "the daemon does not offer UCX: set enabled = true in [ucx] of its configuration, or use "
        "the memory map");
  }
  if (session.ucx_version != UcxVersion()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the daemon runs UCX ", session.ucx_version, " and this process ",
                     UcxVersion(), ", which do not connect: run both with the same libucp"));
  }
  if (session.ucx_port == 0 || session.ucx_port > UINT16_MAX) {
    return absl::InvalidArgumentError(
        absl::StrCat("UCX port ", session.ucx_port, ": must be 1 to 65535"));
  }
  return absl::OkStatus();
}

}  // namespace

void UcxLink::Answer::Set(const absl::Status& status) {
  const absl::MutexLock lock(&mutex_);
  if (!status_.has_value()) {
    status_ = status;
  }
}

bool UcxLink::Answer::IsSet() const {
  const absl::MutexLock lock(&mutex_);
  return status_.has_value();
}

absl::Status UcxLink::Answer::Wait(absl::Duration timeout, absl::string_view what) const {
  const absl::MutexLock lock(&mutex_);
  if (!mutex_.AwaitWithTimeout(absl::Condition(this, &Answer::IsSetLocked), timeout)) {
    return absl::DeadlineExceededError(
        absl::StrCat(what, ": no answer within ", absl::FormatDuration(timeout)));
  }
  return *status_;
}

absl::StatusOr<std::shared_ptr<UcxLink>> UcxLink::Connect(const UcxTransportOptions& options,
                                                          const SessionInfo& session,
                                                          std::shared_ptr<PullTable> pulls,
                                                          absl::Time deadline,
                                                          const Clock& clock) {
  CRUMB_RETURN_IF_ERROR(CheckSession(session));
  CRUMB_ASSIGN_OR_RETURN(ChunkPool chunks,
                         ChunkPool::Create(options.stage_window, options.chunk_bytes));
  // shared: by the transport and by the sources that it opened, which may outlive it.
  std::shared_ptr<UcxLink> link(
      new UcxLink(options, session, std::move(pulls), clock, std::move(chunks)));
  CRUMB_ASSIGN_OR_RETURN(link->worker_, UcxWorker::Create(options.ucx, *link, clock));
  const auto answer = std::make_shared<Answer>();
  CRUMB_RETURN_IF_ERROR(link->worker_->Call([&] {
    absl::Status status = link->EnsurePeer();
    link->answers_[link->hello_id_] = answer;
    return status;
  }));
  CRUMB_RETURN_IF_ERROR(
      answer->Wait(deadline - clock.Now(),
                   absl::StrCat("daemon at UCX ", session.ucx_host, ":", session.ucx_port)));
  return link;
}

UcxLink::UcxLink(const UcxTransportOptions& options,
                 const SessionInfo& session,
                 std::shared_ptr<PullTable> pulls,
                 const Clock& clock,
                 ChunkPool stage_chunks)
    : options_(options),
      session_(session),
      clock_(clock),
      stage_chunks_(std::move(stage_chunks)),
      pulls_(std::move(pulls)) {}

absl::Status UcxLink::EnsurePeer() {
  if (peer_ != UcxPeerId()) {
    return absl::OkStatus();
  }
  hello_id_ = pulls_->NewRequestId();
  CRUMB_ASSIGN_OR_RETURN(
      peer_, worker_->Connect(session_.ucx_host, static_cast<uint16_t>(session_.ucx_port)));
  is_lost_ = false;
  HelloMessage hello;
  hello.preamble = {.op = PullOp::kHello, .request_id = hello_id_};
  hello.session_id = session_.id.value();
  hello.session_secret = session_.secret;
  hello.group = pulls_->group();
  // A failure is told by OnLost.
  worker_->Send(peer_, WireBytes(hello), {}, UcxSend::kCopy, [](const absl::Status&) {});
  return absl::OkStatus();
}

void UcxLink::Reconnect() {
  if (is_lost_) {
    // A failure is told to the next request.
    static_cast<void>(worker_->Post([this] { static_cast<void>(EnsurePeer()); }));
  }
}

absl::Status UcxLink::StartPull(uint64_t request_id, std::shared_ptr<UcxPull> pull) {
  return worker_->Post([this, request_id, pull = std::move(pull)] {
    if (const absl::Status status = EnsurePeer(); !status.ok()) {
      pull->Fail(status);
      return;
    }
    const PullMessage request = pull->request(request_id);
    worker_->Send(peer_, WireBytes(request), std::as_bytes(pull->entries()), UcxSend::kCopy,
                  [pull](const absl::Status& status) {
                    if (!status.ok()) {
                      pull->Fail(status);
                    }
                  });
  });
}

void UcxLink::CancelPull(uint64_t request_id) {
  // When the worker takes no more tasks, its end is the pull's.
  static_cast<void>(worker_->Post([this, request_id] { SendCancel(request_id); }));
}

void UcxLink::SendCancel(uint64_t request_id) {
  CancelMessage cancel;
  cancel.preamble = {.op = PullOp::kCancel, .request_id = request_id};
  worker_->Send(peer_, WireBytes(cancel), {}, UcxSend::kCopy, [](const absl::Status&) {});
}

absl::Status UcxLink::SendPages(PublishId publish,
                                uint64_t offset,
                                std::span<const OutgoingPage> pages,
                                absl::Time deadline) {
  StageMessage message;
  message.preamble = {.op = PullOp::kStage, .request_id = pulls_->NewRequestId()};
  message.publish_id = publish.value();
  for (const OutgoingPage& page : pages) {
    message.request_bytes += page.image.size();
  }
  message.offset = offset;
  // The bounds are the decoder's, at the other end.
  CRUMB_RETURN_IF_ERROR(DecodeMessage(WireBytes(message)).status());
  const uint64_t request_id = message.preamble.request_id;
  const auto answer = std::make_shared<Answer>();
  CRUMB_RETURN_IF_ERROR(worker_->Call([&] {
    answers_[request_id] = answer;
    return EnsurePeer();
  }));
  absl::Status status = SendPieces(message, pages, *answer, deadline);
  if (status.ok()) {
    status = answer->Wait(deadline - clock_.Now(), "publish over UCX");
  }
  static_cast<void>(worker_->Post([this, request_id] { answers_.erase(request_id); }));
  return status;
}

absl::Status UcxLink::SendPieces(StageMessage message,
                                 std::span<const OutgoingPage> pages,
                                 const Answer& answer,
                                 absl::Time deadline) {
  size_t page = 0;
  size_t of_page = 0;  // Bytes of it that were copied.
  while (message.request_offset < message.request_bytes) {
    std::optional<ChunkPool::Chunk> chunk = stage_chunks_.Take(deadline - clock_.Now());
    if (answer.IsSet()) {
      return absl::OkStatus();  // A refusal: the answer says why.
    }
    if (!chunk.has_value()) {
      return absl::DeadlineExceededError(absl::StrCat("publish over UCX: ", message.request_offset,
                                                      " of ", message.request_bytes,
                                                      " bytes were on their way by its deadline"));
    }
    const size_t bytes =
        std::min<size_t>(chunk->bytes().size(), message.request_bytes - message.request_offset);
    for (std::span<std::byte> target = chunk->bytes().first(bytes); !target.empty();) {
      const std::span<const std::byte> rest = pages[page].image.subspan(of_page);
      const size_t copied = std::min(rest.size(), target.size());
      std::copy_n(rest.begin(), copied, target.begin());
      target = target.subspan(copied);
      of_page += copied;
      if (of_page == pages[page].image.size()) {
        ++page;
        of_page = 0;
      }
    }
    CRUMB_RETURN_IF_ERROR(worker_->Post([this, message, bytes, held = std::move(*chunk)]() mutable {
      const std::span<const std::byte> payload = held.bytes().first(bytes);
      worker_->Send(peer_, WireBytes(message), payload, UcxSend::kRendezvous,
                    [held = std::move(held)](const absl::Status&) {});
    }));
    message.offset += bytes;
    message.request_offset += bytes;
  }
  return absl::OkStatus();
}

bool UcxLink::OnPeer(UcxPeerId) {
  return false;  // Nobody connects to an engine.
}

void UcxLink::OnMessage(UcxPeerId peer, UcxMessage& message) {
  const absl::StatusOr<DataPlaneMessage> decoded = DecodeMessage(message.header());
  if (!decoded.ok()) {
    worker_->Close(peer, decoded.status());
  } else if (const auto* chunk = std::get_if<ChunkMessage>(&*decoded)) {
    OnChunk(*chunk, message);
  } else if (const auto* end = std::get_if<EndMessage>(&*decoded)) {
    OnEnd(*end);
  }
}

void UcxLink::OnChunk(const ChunkMessage& chunk, UcxMessage& message) {
  const uint64_t request_id = chunk.preamble.request_id;
  const std::shared_ptr<UcxPull> pull = pulls_->Find(request_id);
  if (pull == nullptr) {
    return;  // No longer wanted.
  }
  const auto target = pull->TargetOf(chunk, message.payload_bytes());
  if (!target.ok()) {
    pull->Fail(target.status());
    pulls_->Remove(request_id);
    SendCancel(request_id);
    return;
  }
  message.Receive(*target, [this, pull, chunk, bytes = target->size()](const absl::Status& status) {
    if (!status.ok()) {
      pull->Fail(
          absl::UnavailableError(absl::StrCat("pull over UCX broke off: ", status.message())));
    } else {
      pull->Landed(chunk, bytes);
    }
    if (!pull->IsOpen()) {
      pulls_->Remove(chunk.preamble.request_id);
    }
  });
}

void UcxLink::OnEnd(const EndMessage& end) {
  const uint64_t request_id = end.preamble.request_id;
  const absl::Status status = EndStatus(end);
  if (const auto pull = pulls_->Find(request_id); pull != nullptr) {
    pull->Fail(status.ok() ? absl::InternalError("the daemon ended a pull with OK") : status);
    pulls_->Remove(request_id);
  }
  if (const auto answer = answers_.find(request_id); answer != answers_.end()) {
    answer->second->Set(status);
    answers_.erase(answer);
  }
  if (request_id == hello_id_ && !status.ok()) {
    FailAll(status);  // The daemon closes the connection, but its words say more.
  }
}

void UcxLink::OnLost(UcxPeerId peer, const absl::Status& reason) {
  if (peer != peer_) {
    return;
  }
  peer_ = UcxPeerId();
  is_lost_ = true;
  FailAll(absl::UnavailableError(absl::StrCat("the daemon at UCX ", session_.ucx_host, ":",
                                              session_.ucx_port, " is lost: ", reason.message())));
}

void UcxLink::FailAll(const absl::Status& status) {
  pulls_->FailAll(status);
  for (const auto& [id, answer] : answers_) {
    answer->Set(status);
  }
  answers_.clear();
}

void UcxLink::OnTick(absl::Time now) {
  for (const uint64_t id : pulls_->RemoveFailed(now)) {
    SendCancel(id);
  }
}

}  // namespace crumb
