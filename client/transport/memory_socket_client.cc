// SPDX-License-Identifier: Apache-2.0
#include "client/transport/memory_socket_client.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

#include "proto/base/status_macros.h"

namespace crumb {
namespace {

absl::Status Unavailable(const std::string& path, const char* what, int error) {
  return absl::UnavailableError(absl::StrCat("memory socket ", path, ": ", what, ": ",
                                             std::strerror(error),  // NOLINT(concurrency-mt-unsafe)
                                             "; is crumbd running, and may this user open it?"));
}

absl::Status TooLate(const std::string& path) {
  return absl::DeadlineExceededError(
      absl::StrCat("memory socket ", path, ": the daemon did not answer in time"));
}

// Room for two descriptors, aligned as the control message in it.
union DescriptorMessage {
  cmsghdr header;
  char bytes[CMSG_SPACE(2 * sizeof(int))];
};

ssize_t SendRequest(int socket, MemoryRequest request, int memfd) {
  iovec io{.iov_base = &request, .iov_len = sizeof(request)};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  DescriptorMessage control{};
  if (memfd >= 0) {
    message.msg_control = control.bytes;
    message.msg_controllen = CMSG_SPACE(sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &memfd, sizeof(int));
  }
  return ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

ssize_t ReceiveReply(int socket, MemoryReply* reply, std::array<UniqueFd, 2>* received) {
  iovec io{.iov_base = reply, .iov_len = sizeof(*reply)};
  DescriptorMessage control{};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof(control.bytes);
  const ssize_t bytes = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  const cmsghdr* header = bytes >= 0 ? CMSG_FIRSTHDR(&message) : nullptr;
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    const size_t count = std::min((header->cmsg_len - CMSG_LEN(0)) / sizeof(int), received->size());
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      (*received)[i].reset(fd);
    }
  }
  return bytes;
}

absl::Status ReplyStatus(const MemoryReply& reply) {
  if (reply.status_code == 0) {
    return absl::OkStatus();
  }
  const char* end = std::find(reply.message.begin(), reply.message.end(), '\0');
  return absl::Status(
      static_cast<absl::StatusCode>(reply.status_code),
      absl::string_view(reply.message.data(), static_cast<size_t>(end - reply.message.begin())));
}

}  // namespace

MemorySocketClient::MemorySocketClient(const SessionInfo& session, const Clock& clock)
    : path_(session.memory_socket), session_(session.id), secret_(session.secret), clock_(clock) {}

absl::Status MemorySocketClient::OpenSocket() {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path_.empty() || path_.size() >= sizeof(address.sun_path)) {
    return absl::UnavailableError(
        path_.empty()
            ? "the daemon offers no memory socket"
            : absl::StrCat("memory socket ", path_, ": the path has ", path_.size(),
                           " bytes, at most ", sizeof(address.sun_path) - 1, " are possible"));
  }
  std::memcpy(address.sun_path, path_.data(), path_.size());
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.is_valid()) {
    return Unavailable(path_, "socket", errno);
  }
  // Does not block: a local connection is made at once, or refused when the backlog is full.
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return Unavailable(path_, "connect", errno);
  }
  socket_ = std::move(socket);
  return absl::OkStatus();
}

absl::Status MemorySocketClient::WaitForSocket(short events, absl::Time deadline) {  // NOLINT
  for (;;) {
    const int64_t left_ms =
        absl::ToInt64Milliseconds(absl::Ceil(deadline - clock_.Now(), absl::Milliseconds(1)));
    if (left_ms <= 0) {
      return TooLate(path_);
    }
    pollfd poll{.fd = socket_.get(), .events = events, .revents = 0};
    const int ready = ::poll(&poll, 1, static_cast<int>(std::min<int64_t>(left_ms, 60'000)));
    if (ready > 0) {
      return absl::OkStatus();
    }
    if (ready < 0 && errno != EINTR) {
      return Unavailable(path_, "poll", errno);
    }
  }
}

absl::StatusOr<MemorySocketClient::Answer> MemorySocketClient::ExchangeOnce(
    const MemoryRequest& request, int memfd, absl::Time deadline) {
  if (!socket_.is_valid()) {
    CRUMB_RETURN_IF_ERROR(OpenSocket());
  }
  CRUMB_RETURN_IF_ERROR(WaitForSocket(POLLOUT, deadline));
  if (SendRequest(socket_.get(), request, memfd) < 0) {
    return Unavailable(path_, "send", errno);
  }
  CRUMB_RETURN_IF_ERROR(WaitForSocket(POLLIN, deadline));
  Answer answer;
  const ssize_t bytes = ReceiveReply(socket_.get(), &answer.reply, &answer.received);
  if (bytes <= 0) {
    return Unavailable(path_, "the daemon closed the connection", bytes < 0 ? errno : ECONNRESET);
  }
  if (bytes != sizeof(MemoryReply) || answer.reply.magic != kMemorySocketMagic ||
      answer.reply.version != kMemorySocketVersion) {
    return absl::UnavailableError(absl::StrCat(
        "memory socket ", path_, ": a reply of ", bytes, " bytes, version ", answer.reply.version,
        "; this library speaks version ", kMemorySocketVersion, " in packets of ",
        sizeof(MemoryReply), " bytes: use the library and the daemon of one release"));
  }
  return answer;
}

absl::Status MemorySocketClient::TakeTurn(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  const auto is_free = [this] {
    mutex_.AssertReaderHeld();
    return !taken_;
  };
  if (!mutex_.AwaitWithTimeout(absl::Condition(&is_free), deadline - clock_.Now())) {
    return TooLate(path_);
  }
  taken_ = true;
  return absl::OkStatus();
}

void MemorySocketClient::EndTurn() {
  absl::MutexLock lock(&mutex_);
  taken_ = false;
}

absl::StatusOr<MemorySocketClient::Answer> MemorySocketClient::Exchange(
    const MemoryRequest& request, int memfd, absl::Time deadline) {
  CRUMB_RETURN_IF_ERROR(TakeTurn(deadline));
  const bool reused = socket_.is_valid();
  auto answer = ExchangeOnce(request, memfd, deadline);
  if (reused && answer.status().code() == absl::StatusCode::kUnavailable) {
    // The daemon may have closed an idle connection; both requests may be repeated.
    socket_.reset();
    answer = ExchangeOnce(request, memfd, deadline);
  }
  if (!answer.ok()) {
    socket_.reset();  // Nothing of a broken exchange may be taken for the next one's reply.
  }
  EndTurn();
  return answer;
}

MemoryRequest MemorySocketClient::Request(MemoryOp op, uint64_t argument) const {
  MemoryRequest request;
  request.op = op;
  request.session_id = session_.value();
  request.session_secret = secret_;
  request.argument = argument;
  return request;
}

absl::Status MemorySocketClient::Connect(absl::Time deadline) {
  CRUMB_RETURN_IF_ERROR(TakeTurn(deadline));
  absl::Status status = socket_.is_valid() ? absl::OkStatus() : OpenSocket();
  EndTurn();
  return status;
}

absl::StatusOr<MemorySocketClient::Chunk> MemorySocketClient::GetChunk(ChunkId chunk,
                                                                       absl::Time deadline) {
  CRUMB_ASSIGN_OR_RETURN(Answer answer,
                         Exchange(Request(MemoryOp::kGetChunk, chunk.value()), -1, deadline));
  CRUMB_RETURN_IF_ERROR(ReplyStatus(answer.reply));
  if (!answer.received[0].is_valid()) {
    return absl::InternalError(absl::StrCat("memory socket ", path_, ": chunk ", chunk.value(),
                                            " came without its memfd; is this process out of file "
                                            "descriptors (ulimit -n)?"));
  }
  return Chunk{.memfd = std::move(answer.received[0]),
               .gpu_memory = {},
               .bytes = answer.reply.bytes,
               .num_blocks = answer.reply.num_blocks};
}

absl::StatusOr<MemorySocketClient::Chunk> MemorySocketClient::GetCopyChunk(ChunkId chunk,
                                                                           absl::Time deadline) {
  CRUMB_ASSIGN_OR_RETURN(Answer answer,
                         Exchange(Request(MemoryOp::kGetCopyChunk, chunk.value()), -1, deadline));
  CRUMB_RETURN_IF_ERROR(ReplyStatus(answer.reply));
  if (!answer.received[1].is_valid()) {
    return absl::InternalError(absl::StrCat(
        "memory socket ", path_, ": chunk ", chunk.value(),
        " of copies came without its two descriptors; is this process out of file descriptors "
        "(ulimit -n)?"));
  }
  return Chunk{.memfd = std::move(answer.received[0]),
               .gpu_memory = std::move(answer.received[1]),
               .bytes = answer.reply.bytes,
               .num_blocks = answer.reply.num_blocks};
}

absl::StatusOr<std::vector<ListedChunk>> MemorySocketClient::ListChunks(bool of_copies,
                                                                        size_t max,
                                                                        absl::Time deadline) {
  const MemoryOp op = of_copies ? MemoryOp::kListCopyChunks : MemoryOp::kListChunks;
  std::vector<ListedChunk> chunks;
  size_t num_new = kMaxListedChunks;
  while (num_new == kMaxListedChunks && chunks.size() < max) {
    const uint64_t below = chunks.empty() ? 0 : chunks.back().id;
    CRUMB_ASSIGN_OR_RETURN(const Answer answer, Exchange(Request(op, below), -1, deadline));
    CRUMB_RETURN_IF_ERROR(ReplyStatus(answer.reply));
    const std::vector<ListedChunk> listed = ListedChunksOf(answer.reply);
    num_new = listed.size();
    chunks.insert(chunks.end(), listed.begin(), listed.end());
  }
  return chunks;
}

absl::Status MemorySocketClient::GiveStaging(int memfd, uint64_t bytes, absl::Time deadline) {
  CRUMB_ASSIGN_OR_RETURN(const Answer answer,
                         Exchange(Request(MemoryOp::kGiveStaging, bytes), memfd, deadline));
  return ReplyStatus(answer.reply);
}

}  // namespace crumb
