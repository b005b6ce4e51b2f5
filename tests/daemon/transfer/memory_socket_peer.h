// SPDX-License-Identifier: Apache-2.0
//
// The other end of the memory socket, as a test may want it: correct, or not.
#pragma once

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <optional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "gtest/gtest.h"

#include "proto/base/unique_fd.h"
#include "proto/wire/memory_socket.h"

namespace crumb {

// A reply, and the descriptors that came with it.
struct MemorySocketAnswer {
  MemoryReply reply;
  UniqueFd fd;
  UniqueFd second_fd;

  absl::StatusCode code() const { return static_cast<absl::StatusCode>(reply.status_code); }
  std::string message() const { return reply.message.data(); }
};

// A peer of the memory socket that may send anything. Confined to one thread.
class MemorySocketPeer {
 public:
  explicit MemorySocketPeer(const std::string& path)
      : fd_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    is_connected_ =
        connect(fd_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
    const timeval timeout{.tv_sec = 20, .tv_usec = 0};
    setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  }

  bool is_connected() const { return is_connected_; }

  bool Send(std::span<const std::byte> packet, std::span<const int> fds = {}) {
    iovec part{const_cast<std::byte*>(packet.data()), packet.size()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(32 * sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (!fds.empty()) {
      message.msg_control = control.data();
      message.msg_controllen = CMSG_SPACE(fds.size_bytes());
      cmsghdr* const header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(fds.size_bytes());
      std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
    }
    return sendmsg(fd_.get(), &message, MSG_NOSIGNAL) == static_cast<ssize_t>(packet.size());
  }
  // Nothing: the daemon closed the connection.
  std::optional<MemorySocketAnswer> Receive() {
    MemorySocketAnswer answer;
    iovec part{&answer.reply, sizeof(answer.reply)};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(2 * sizeof(int))> control;
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t bytes = recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC);
    if (bytes <= 0) {
      EXPECT_TRUE(bytes == 0 || errno == ECONNRESET) << std::strerror(errno);
      return std::nullopt;
    }
    EXPECT_EQ(bytes, static_cast<ssize_t>(sizeof(answer.reply)));
    if (const cmsghdr* const header = CMSG_FIRSTHDR(&message); header != nullptr) {
      int fds[2] = {-1, -1};
      std::memcpy(fds, CMSG_DATA(header),
                  std::min(sizeof(fds), static_cast<size_t>(header->cmsg_len) - CMSG_LEN(0)));
      answer.fd.reset(fds[0]);
      answer.second_fd.reset(fds[1]);
    }
    return answer;
  }
  std::optional<MemorySocketAnswer> Ask(const MemoryRequest& request,
                                        std::span<const int> fds = {}) {
    if (!Send(std::as_bytes(std::span(&request, 1)), fds)) {
      return std::nullopt;
    }
    return Receive();
  }

 private:
  UniqueFd fd_;
  bool is_connected_ = false;
};

}  // namespace crumb
