// SPDX-License-Identifier: Apache-2.0
#include "daemon/metrics/http_listener.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

constexpr absl::Duration kAcceptPause = absl::Milliseconds(100);

absl::Time Now() {
  return Clock::System().Now();
}

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

bool IsComplete(const std::string& request) {
  return absl::StrContains(request, "\r\n\r\n");
}

std::string Answer(absl::string_view status, absl::string_view body, bool with_body = true) {
  return absl::StrCat("HTTP/1.1 ", status,
                      "\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
                      "Content-Length: ",
                      body.size(), "\r\nConnection: close\r\n\r\n", with_body ? body : "");
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpListener>> HttpListener::Create(
    const std::string& address, std::function<std::string()> render) {
  CRUMB_ASSIGN_OR_RETURN(UniqueFd listener, Listen(address));
  CRUMB_ASSIGN_OR_RETURN(const uint16_t port, PortOf(listener.get()));
  return std::unique_ptr<HttpListener>(
      new HttpListener(std::move(listener), port, std::move(render)));
}

HttpListener::HttpListener(UniqueFd listener, uint16_t port, std::function<std::string()> render)
    : listener_(std::move(listener)),
      wake_(::eventfd(0, EFD_CLOEXEC)),
      port_(port),
      render_(std::move(render)) {
  CRUMB_CHECK(wake_.is_valid(), "an eventfd can be made");
  thread_ = std::thread([this] { RunThread(); });
}

HttpListener::~HttpListener() {
  const uint64_t one = 1;
  CRUMB_CHECK(::write(wake_.get(), &one, sizeof(one)) == sizeof(one), "an eventfd takes a 1");
  thread_.join();
}

void HttpListener::RunThread() {
  for (;;) {
    std::vector<pollfd> set = PollSet();
    if (::poll(set.data(), set.size(), PollTimeoutMs()) < 0 && errno != EINTR) {
      // Only for want of memory. The deadlines below still end what is there.
      accept_after_ = Now() + kAcceptPause;
      continue;
    }
    if (set[0].revents != 0) {
      return;
    }
    // Backwards, so that what is erased moves none that is still to come.
    for (size_t i = connections_.size(); i-- > 0;) {
      const bool is_over = Now() >= connections_[i].deadline;
      if (is_over || (set[i + 2].revents != 0 && !Serve(connections_[i]))) {
        connections_.erase(connections_.begin() + static_cast<ptrdiff_t>(i));
      }
    }
    if (set[1].revents != 0) {
      Accept();
    }
  }
}

std::vector<pollfd> HttpListener::PollSet() const {
  const bool accepts = connections_.size() < kMaxConnections && Now() >= accept_after_;
  std::vector<pollfd> set = {{wake_.get(), POLLIN, 0}, {accepts ? listener_.get() : -1, POLLIN, 0}};
  for (const Connection& connection : connections_) {
    const short events = connection.reply.empty() ? POLLIN : POLLOUT;
    set.push_back({connection.socket.get(), events, 0});
  }
  return set;
}

int HttpListener::PollTimeoutMs() const {
  const absl::Time now = Now();
  absl::Time first = accept_after_ > now ? accept_after_ : absl::InfiniteFuture();
  for (const Connection& connection : connections_) {
    first = std::min(first, connection.deadline);
  }
  return first == absl::InfiniteFuture()
             ? -1
             : static_cast<int>(std::max<int64_t>(0, absl::ToInt64Milliseconds(first - now)) + 1);
}

void HttpListener::Accept() {
  UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket.is_valid()) {
    connections_.push_back({std::move(socket), Now() + kExchangeTime, "", "", 0});
  } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
    accept_after_ = Now() + kAcceptPause;  // It would be reported again at once.
  }
}

bool HttpListener::Serve(Connection& connection) const {
  if (connection.reply.empty() && !Receive(connection)) {
    return false;
  }
  while (connection.sent < connection.reply.size()) {
    const ssize_t sent = ::send(connection.socket.get(), connection.reply.data() + connection.sent,
                                connection.reply.size() - connection.sent, MSG_NOSIGNAL);
    if (sent < 0) {
      return errno == EAGAIN || errno == EINTR;
    }
    connection.sent += static_cast<size_t>(sent);
  }
  return connection.reply.empty();
}

bool HttpListener::Receive(Connection& connection) const {
  std::array<char, 2048> bytes;  // NOLINT: recv fills it.
  const ssize_t got = ::recv(connection.socket.get(), bytes.data(), bytes.size(), 0);
  if (got <= 0) {
    return got < 0 && (errno == EAGAIN || errno == EINTR);
  }
  connection.request.append(bytes.data(), static_cast<size_t>(got));
  if (IsComplete(connection.request)) {
    connection.reply = Reply(connection.request);
  } else if (connection.request.size() > kMaxRequestBytes) {
    connection.reply = Answer("431 Request Header Fields Too Large",
                              absl::StrCat("at most ", kMaxRequestBytes, " bytes are read\n"));
  }
  return true;
}

std::string HttpListener::Reply(const std::string& request) const {
  const absl::string_view line = absl::string_view(request).substr(0, request.find("\r\n"));
  const size_t path_at = line.find(' ') + 1;  // 0: there is none.
  const size_t path_end = line.find_first_of(" ?", path_at);
  if (path_at == 0 || path_end == absl::string_view::npos || !absl::StrContains(line, " HTTP/1.")) {
    return Answer("400 Bad Request", "this is not HTTP/1.1\n");
  }
  const absl::string_view method = line.substr(0, path_at - 1);
  const absl::string_view path = line.substr(path_at, path_end - path_at);
  if (path != "/metrics") {
    return Answer("404 Not Found", "there is /metrics, and nothing else\n");
  }
  if (method != "GET" && method != "HEAD") {
    return Answer("405 Method Not Allowed\r\nAllow: GET, HEAD", "GET it\n");
  }
  return Answer("200 OK", render_(), method == "GET");
}

}  // namespace crumb
