// SPDX-License-Identifier: Apache-2.0
//
// Serves one page, /metrics, over HTTP to whoever scrapes it: GET and HEAD, one request a
// connection. Bounded in everything, since anyone may connect: connections, bytes of a request, and
// idle time.
//
// GNU libmicrohttpd does the HTTP. prometheus-cpp's own server (CivetWeb) looks every two seconds
// whether it is to stop, which is what a daemon with nothing to do took to exit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

struct MHD_Daemon;

namespace crumb {

// Thread-safe. One thread of its own.
class HttpListener {
 public:
  static constexpr unsigned kMaxConnections = 16;  // Further ones wait in the socket's queue.
  static constexpr size_t kMaxRequestBytes = 8192;
  static constexpr unsigned kIdleSeconds = 10;  // A connection that says nothing is closed.

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
  HttpListener(uint16_t port, std::function<std::string()> render);

  const uint16_t port_;
  const std::function<std::string()> render_;
  MHD_Daemon* server_ = nullptr;
};

}  // namespace crumb
