// SPDX-License-Identifier: Apache-2.0
#include "daemon/transfer/memory_socket_server.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "proto/base/check.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

// A request passes one descriptor; room for more, so that a peer that sends several cannot leave
// them open here.
constexpr size_t kMaxReceivedFds = 8;

// What recvmsg may answer: a packet, a peer that is gone, or nothing yet.
enum class Received { kPacket, kNothing, kClosed };

struct Packet {
  MemoryRequest request;
  size_t bytes = 0;
  UniqueFd fd;  // Of the first descriptor that came along.
};

// Takes every descriptor of a message into ownership; keeps the first.
void TakeDescriptors(msghdr& message, Packet& packet) {
  for (cmsghdr* control = CMSG_FIRSTHDR(&message); control != nullptr;
       control = CMSG_NXTHDR(&message, control)) {
    if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    const size_t count = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(control) + i * sizeof(int), sizeof(int));
      UniqueFd owned(fd);
      if (!packet.fd.is_valid()) {
        packet.fd = std::move(owned);
      }
    }
  }
}

Received Receive(int connection, Packet& packet) {
  // One byte more than a request, so that a longer packet is seen to be longer.
  std::array<char, sizeof(MemoryRequest) + 1> buffer{};
  iovec part{buffer.data(), buffer.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxReceivedFds * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t bytes = recvmsg(connection, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (bytes < 0) {
    return errno == EAGAIN || errno == EINTR ? Received::kNothing : Received::kClosed;
  }
  TakeDescriptors(message, packet);
  if (bytes == 0) {
    return Received::kClosed;
  }
  packet.bytes = static_cast<size_t>(bytes);
  std::memcpy(&packet.request, buffer.data(), std::min(packet.bytes, sizeof(packet.request)));
  return Received::kPacket;
}

absl::Status CheckRequest(const Packet& packet) {
  if (packet.bytes != sizeof(MemoryRequest)) {
    return absl::InvalidArgumentError(absl::StrCat("a packet of ", packet.bytes,
                                                   " bytes: requests on the memory socket have ",
                                                   sizeof(MemoryRequest)));
  }
  if (packet.request.magic != kMemorySocketMagic) {
    return absl::InvalidArgumentError(
        absl::StrFormat("magic %08x: requests on the memory socket start with %08x",
                        packet.request.magic, kMemorySocketMagic));
  }
  if (packet.request.version != kMemorySocketVersion) {
    return absl::InvalidArgumentError(absl::StrCat(
        "version ", packet.request.version, " of the memory socket, the daemon speaks ",
        kMemorySocketVersion, ": use a libcrumb of the daemon's version"));
  }
  return absl::OkStatus();
}

absl::Status SystemError(std::string_view call, const std::string& path) {
  return absl::UnavailableError(absl::StrCat("memory socket ", path, ": ", std::string(call), ": ",
                                             std::generic_category().message(errno)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<MemorySocketServer>> MemorySocketServer::Create(
    MemorySocketOptions options, const PageStore& store, SessionTable& sessions) {
  std::unique_ptr<MemorySocketServer> server(
      new MemorySocketServer(std::move(options), store, sessions));
  CRUMB_RETURN_IF_ERROR(server->Listen());
  server->thread_ = std::thread([raw = server.get()] { raw->RunThread(); });
  return server;
}

std::string MemorySocketServer::Description() const {
  return absl::StrCat("memory map, by the socket ", options_.path);
}

absl::Status MemorySocketServer::Listen() {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (options_.path.size() >= sizeof(address.sun_path)) {
    return absl::UnavailableError(
        absl::StrCat("memory socket ", options_.path, ": the path has ", options_.path.size(),
                     " bytes, and a Unix socket's at most ", sizeof(address.sun_path) - 1));
  }
  std::memcpy(address.sun_path, options_.path.c_str(), options_.path.size() + 1);

  listener_.reset(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
  wake_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!listener_.is_valid() || !epoll_.is_valid() || !wake_.is_valid()) {
    return SystemError("socket, epoll_create1, eventfd", options_.path);
  }
  spare_.reset(open("/dev/null", O_RDONLY | O_CLOEXEC));
  unlink(options_.path.c_str());
  // Linux gives the file the socket's own mode, so it is never open to more than it should be.
  if (fchmod(listener_.get(), options_.mode) != 0 ||
      bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return SystemError("bind", options_.path);
  }
  if (chmod(options_.path.c_str(), options_.mode) != 0 || listen(listener_.get(), 128) != 0) {
    return SystemError("listen", options_.path);
  }
  for (const int fd : {listener_.get(), wake_.get()}) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
      return SystemError("epoll_ctl", options_.path);
    }
  }
  return absl::OkStatus();
}

void MemorySocketServer::Stop() {
  if (!thread_.joinable()) {
    return;
  }
  const uint64_t one = 1;
  const ssize_t written = write(wake_.get(), &one, sizeof(one));
  CRUMB_CHECK(written == sizeof(one), "an eventfd takes a one");
  thread_.join();
  listener_.reset();
  unlink(options_.path.c_str());
}

void MemorySocketServer::RunThread() {
  std::array<epoll_event, 64> events{};
  while (true) {
    const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), -1);
    CRUMB_CHECK(count >= 0 || errno == EINTR, "epoll_wait fails by signals only");
    for (int i = 0; i < count; ++i) {
      const int fd = events[static_cast<size_t>(i)].data.fd;
      if (fd == wake_.get()) {
        connections_.clear();
        return;
      }
      if (fd == listener_.get()) {
        Accept();
      } else if (!Serve(fd)) {
        connections_.erase(fd);  // Closed, and so gone from epoll.
      }
    }
  }
}

void MemorySocketServer::Accept() {
  UniqueFd connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!connection.is_valid()) {
    if (errno == EMFILE || errno == ENFILE) {
      // Out of descriptors: give up the spare one to turn the peer away, or epoll would report it
      // for ever.
      spare_.reset();
      UniqueFd turned_away(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      turned_away.reset();
      spare_.reset(open("/dev/null", O_RDONLY | O_CLOEXEC));
    }
    return;
  }
  if (connections_.size() >= options_.max_connections) {
    Send(connection.get(),
         {.status = absl::ResourceExhaustedError(absl::StrCat(
              "the memory socket has ", connections_.size(),
              " connections, its limit: use one for all of an engine's requests, or pull over "
              "UCX"))});
    return;
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = connection.get();
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, connection.get(), &event) == 0) {
    const int fd = connection.get();
    connections_.emplace(fd, std::move(connection));
  }
}

bool MemorySocketServer::Send(int connection, const Reply& answer) {
  MemoryReply reply;
  reply.status_code = static_cast<uint16_t>(answer.status.raw_code());
  const size_t length = std::min(answer.status.message().size(), reply.message.size() - 1);
  // Of OK there may be no data at all, which memcpy must not be given.
  std::copy_n(answer.status.message().data(), length, reply.message.data());
  for (size_t i = 0; i < answer.listed.size(); ++i) {
    std::memcpy(reply.message.data() + i * sizeof(ListedChunk), &answer.listed[i],
                sizeof(ListedChunk));
  }
  reply.bytes = answer.bytes;
  reply.num_blocks = answer.num_blocks;
  iovec part{&reply, sizeof(reply)};
  std::array<int, 2> fds{};
  size_t num_fds = 0;
  for (const UniqueFd& fd : answer.fds) {
    if (fd.is_valid()) {
      fds[num_fds++] = fd.get();
    }
  }
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(fds))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (num_fds > 0) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(num_fds * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(num_fds * sizeof(int));
    std::memcpy(CMSG_DATA(header), fds.data(), num_fds * sizeof(int));
  }
  return sendmsg(connection, &message, MSG_DONTWAIT | MSG_NOSIGNAL) ==
         static_cast<ssize_t>(sizeof(reply));
}

bool MemorySocketServer::Serve(int connection) {
  Packet packet;
  switch (Receive(connection, packet)) {
    case Received::kNothing:
      return true;
    case Received::kClosed:
      return false;
    case Received::kPacket:
      break;
  }
  if (absl::Status status = CheckRequest(packet); !status.ok()) {
    Send(connection, {.status = std::move(status)});
    return false;
  }
  return Send(connection, Answer(packet.request, packet.fd));
}

MemorySocketServer::Reply MemorySocketServer::AnswerChunk(const MemoryRequest& request) const {
  if (request.argument == 0 || request.argument > UINT32_MAX) {
    return {.status = absl::InvalidArgumentError(
                absl::StrCat("chunk ", request.argument, ": ids of chunks are 1 to ", UINT32_MAX))};
  }
  const SessionId session(request.session_id);
  const ChunkId id(static_cast<uint32_t>(request.argument));
  if (request.op == MemoryOp::kGetChunk) {
    auto chunk = store_.GetChunk(session, id);
    return chunk.ok() ? Reply{.status = absl::OkStatus(),
                              .fds = {std::move(chunk->fd)},
                              .bytes = chunk->bytes,
                              .num_blocks = chunk->num_blocks}
                      : Reply{.status = chunk.status()};
  }
  auto chunk = store_.GetCopyChunk(session, id);
  return chunk.ok() ? Reply{.status = absl::OkStatus(),
                            .fds = {std::move(chunk->headers), std::move(chunk->memory)},
                            .bytes = chunk->memory_bytes,
                            .num_blocks = chunk->num_blocks}
                    : Reply{.status = chunk.status()};
}

MemorySocketServer::Reply MemorySocketServer::AnswerList(const MemoryRequest& request) const {
  const auto below =
      static_cast<uint32_t>(std::min<uint64_t>(request.argument, UINT32_MAX));  // No id is larger.
  const auto chunks =
      store_.ListChunks(SessionId(request.session_id), request.op == MemoryOp::kListCopyChunks,
                        ChunkId(below), kMaxListedChunks);
  Reply reply{.status = chunks.status()};
  for (const ChunkName& chunk : chunks.ok() ? *chunks : std::vector<ChunkName>()) {
    reply.listed.push_back({chunk.id.value(), static_cast<uint32_t>(chunk.encoding)});
  }
  reply.num_blocks = reply.listed.size();
  return reply;
}

MemorySocketServer::Reply MemorySocketServer::Answer(const MemoryRequest& request,
                                                     const UniqueFd& received) {
  const SessionId session(request.session_id);
  if (absl::Status status = sessions_.Authenticate(session, request.session_secret); !status.ok()) {
    return {.status = std::move(status)};
  }
  switch (request.op) {
    case MemoryOp::kGetChunk:
    case MemoryOp::kGetCopyChunk:
      return AnswerChunk(request);
    case MemoryOp::kListChunks:
    case MemoryOp::kListCopyChunks:
      return AnswerList(request);
    case MemoryOp::kGiveStaging: {
      if (!received.is_valid()) {
        return {.status = absl::InvalidArgumentError(
                    "no descriptor came with the request: pass the staging memfd by SCM_RIGHTS")};
      }
      auto staging = StagingMemory::MapMemfd(received.get(), request.argument);
      if (!staging.ok()) {
        return {.status = std::move(staging).status()};
      }
      return {.status = sessions_.SetStaging(session, *std::move(staging))};
    }
  }
  return {
      .status = absl::InvalidArgumentError(absl::StrCat(
          "operation ", static_cast<uint16_t>(request.op), ": the memory socket knows 1 to 5"))};
}

}  // namespace crumb
