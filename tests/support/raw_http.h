// SPDX-License-Identifier: Apache-2.0
//
// Bytes to and from a port of this machine, for tests of what listens there.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <string>

#include "proto/base/unique_fd.h"

namespace crumb {

inline UniqueFd ConnectLoopback(uint16_t port) {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_port = htons(port);
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::connect(socket.get(), reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
  return socket;
}

inline void SendAll(const UniqueFd& socket, const std::string& bytes) {
  EXPECT_EQ(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
}

// Until the other end closes.
inline std::string ReadAll(const UniqueFd& socket) {
  std::string all;
  std::array<char, 65536> bytes;
  for (ssize_t got = 0; (got = ::recv(socket.get(), bytes.data(), bytes.size(), 0)) > 0;) {
    all.append(bytes.data(), static_cast<size_t>(got));
  }
  return all;
}

// One request and all of its answer.
inline std::string AskHttp(uint16_t port, const std::string& request) {
  const UniqueFd socket = ConnectLoopback(port);
  SendAll(socket, request);
  return ReadAll(socket);
}

}  // namespace crumb
