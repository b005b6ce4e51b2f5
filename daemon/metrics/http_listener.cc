// SPDX-License-Identifier: Apache-2.0
#include "daemon/metrics/http_listener.h"

#include <microhttpd.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <memory>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

#include "proto/base/status_macros.h"
#include "proto/base/unique_fd.h"

namespace crumb {
namespace {

absl::Status Unavailable(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::generic_category().message(errno)));
}

absl::StatusOr<UniqueFd> Bind(const addrinfo& address) {
  UniqueFd socket(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  // A daemon that has just ended leaves connections in TIME_WAIT.
  const int on = 1;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (!socket.is_valid() || ::bind(socket.get(), address.ai_addr, address.ai_addrlen) != 0 ||
      ::listen(socket.get(), SOMAXCONN) != 0) {
    return Unavailable("bind");
  }
  return socket;
}

absl::StatusOr<UniqueFd> Listen(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) {
    return absl::UnavailableError("it has no port: write host:port");
  }
  absl::string_view host = absl::string_view(address).substr(0, colon);
  if (absl::ConsumePrefix(&host, "[")) {
    absl::ConsumeSuffix(&host, "]");
  }
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int error =
          ::getaddrinfo(std::string(host).c_str(), address.c_str() + colon + 1, &hints, &found);
      error != 0) {
    return absl::UnavailableError(::gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  return Bind(*found);
}

absl::StatusOr<uint16_t> PortOf(int socket) {
  sockaddr_storage name{};
  socklen_t size = sizeof(name);
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&name), &size) != 0) {
    return Unavailable("getsockname");
  }
  return ntohs(name.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&name)->sin6_port
                                          : reinterpret_cast<sockaddr_in*>(&name)->sin_port);
}

MHD_Result Answer(MHD_Connection* connection, unsigned code, std::string body) {
  MHD_Response* response =
      MHD_create_response_from_buffer(body.size(), body.data(), MHD_RESPMEM_MUST_COPY);
  if (response == nullptr) {
    return MHD_NO;
  }
  MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE,
                          "text/plain; version=0.0.4; charset=utf-8");
  MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close");
  if (code == MHD_HTTP_METHOD_NOT_ALLOWED) {
    MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
  }
  const MHD_Result queued = MHD_queue_response(connection, code, response);
  MHD_destroy_response(response);
  return queued;
}

// Called with the head of a request, and again at its end.
// NOLINTNEXTLINE(readability-function-size): the parameters are the library's.
MHD_Result OnRequest(void* render,
                     MHD_Connection* connection,
                     const char* url,
                     const char* method,
                     const char* /*version*/,
                     const char* /*upload*/,
                     size_t* upload_bytes,
                     void** /*state*/) {
  if (*upload_bytes != 0) {
    return MHD_NO;  // No request here has a body.
  }
  if (absl::string_view(url) != "/metrics") {
    return Answer(connection, MHD_HTTP_NOT_FOUND, "there is /metrics, and nothing else\n");
  }
  const absl::string_view verb(method);
  if (verb != MHD_HTTP_METHOD_GET && verb != MHD_HTTP_METHOD_HEAD) {
    return Answer(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "GET it\n");
  }
  return Answer(connection, MHD_HTTP_OK,
                (*static_cast<const std::function<std::string()>*>(render))());
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpListener>> HttpListener::Create(
    const std::string& address, std::function<std::string()> render) {
  CRUMB_ASSIGN_OR_RETURN(UniqueFd socket, Listen(address));
  CRUMB_ASSIGN_OR_RETURN(const uint16_t port, PortOf(socket.get()));
  std::unique_ptr<HttpListener> listener(new HttpListener(port, std::move(render)));
  listener->server_ = MHD_start_daemon(
      MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_POLL | MHD_USE_ITC, port, nullptr, nullptr,
      OnRequest, const_cast<std::function<std::string()>*>(&listener->render_),
      MHD_OPTION_LISTEN_SOCKET, socket.get(), MHD_OPTION_CONNECTION_LIMIT, kMaxConnections,
      MHD_OPTION_CONNECTION_MEMORY_LIMIT, kMaxRequestBytes, MHD_OPTION_CONNECTION_TIMEOUT,
      kIdleSeconds, MHD_OPTION_END);
  if (listener->server_ == nullptr) {
    return Unavailable("starting the HTTP server");
  }
  static_cast<void>(socket.release());  // The server closes it.
  return listener;
}

HttpListener::HttpListener(uint16_t port, std::function<std::string()> render)
    : port_(port), render_(std::move(render)) {}

HttpListener::~HttpListener() {
  if (server_ != nullptr) {
    MHD_stop_daemon(server_);
  }
}

}  // namespace crumb
