// SPDX-License-Identifier: Apache-2.0
//
// Serves one page, /metrics, over HTTP/1.1 to whoever scrapes it: GET and HEAD, one request a
// connection. Bounded in everything, since anyone may connect: connections, bytes of a request, and
// the time from the one's first to the answer's last byte.
//
// Why not prometheus-cpp's own server (CivetWeb): it looks every two seconds whether it is to stop,
// which is what a daemon with nothing to do took to exit, and adds metrics of itself to the page.
#pragma once

#include <poll.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "proto/base/unique_fd.h"

namespace crumb {

// Thread-safe. One thread of its own.
class HttpListener {
 public:
  static constexpr size_t kMaxConnections = 16;  // Further ones wait in the socket's queue.
  static constexpr size_t kMaxRequestBytes = 8192;
  static constexpr absl::Duration kExchangeTime = absl::Seconds(10);  // Of one connection.

  // Serves on return, at "host:port" (IPv6 in brackets, port 0: any). `render` makes the page, on
  // the listener's thread. UNAVAILABLE says why the address cannot be had.
  static absl::StatusOr<std::unique_ptr<HttpListener>> Create(const std::string& address,
                                                              std::function<std::string()> render);
  // Drops the connections and returns at once.
  ~HttpListener();
  HttpListener(const HttpListener&) = delete;
  HttpListener& operator=(const HttpListener&) = delete;

  uint16_t port() const { return port_; }

 private:
  struct Connection {
    UniqueFd socket;
    absl::Time deadline;
    std::string request;
    std::string reply;  // Empty: the request is not complete.
    size_t sent = 0;
  };

  HttpListener(UniqueFd listener, uint16_t port, std::function<std::string()> render);
  void RunThread();
  // What to wait for: the wake-up, the listener, and each connection.
  std::vector<pollfd> PollSet() const;
  int PollTimeoutMs() const;
  void Accept();
  // False: the connection is done, well or not.
  bool Serve(Connection& connection) const;
  bool Receive(Connection& connection) const;
  std::string Reply(const std::string& request) const;

  const UniqueFd listener_;
  const UniqueFd wake_;  // An eventfd; readable: stop.
  const uint16_t port_;
  const std::function<std::string()> render_;
  // Confined to the thread.
  std::vector<Connection> connections_;
  absl::Time accept_after_ =
      absl::InfinitePast();  // Later than now while there are no descriptors.

  std::thread thread_;
};

}  // namespace crumb
