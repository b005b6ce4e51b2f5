// SPDX-License-Identifier: Apache-2.0
//
// The listener of /metrics, by raw sockets: what scrapers, and those who are none, get of it.
#include "daemon/metrics/http_listener.h"

#include <sys/socket.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "proto/base/clock.h"
#include "tests/support/raw_http.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

// Of a request without a body, after its method and path. HTTP/1.1 demands a host.
const std::string kToTheEnd = " HTTP/1.1\r\nHost: here\r\n\r\n";

class HttpListenerTest : public testing::Test {
 protected:
  UniqueFd Connect() const { return ConnectLoopback(listener_->port()); }
  std::string Ask(const std::string& line) const {
    return AskHttp(listener_->port(), line + kToTheEnd);
  }

  std::string page_ = "crumb_sessions 1\n";
  std::unique_ptr<HttpListener> listener_ =
      *HttpListener::Create("127.0.0.1:0", [this] { return page_; });
};

TEST_F(HttpListenerTest, GetGivesThePageWithItsLengthAndCloses) {
  EXPECT_THAT(Ask("GET /metrics"),
              AllOf(StartsWith("HTTP/1.1 200 OK\r\n"), HasSubstr("text/plain; version=0.0.4"),
                    HasSubstr("Content-Length: 17\r\n"), EndsWith("\r\n\r\ncrumb_sessions 1\n")));
  EXPECT_THAT(AskHttp(listener_->port(), "GET /metrics?name=x HTTP/1.0\r\n\r\n"),
              StartsWith("HTTP/1.1 200 OK\r\n"));
}

TEST_F(HttpListenerTest, HeadGivesTheLengthAlone) {
  EXPECT_THAT(Ask("HEAD /metrics"),
              AllOf(HasSubstr("Content-Length: 17\r\n"), EndsWith("\r\n\r\n")));
}

TEST_F(HttpListenerTest, PageOfMegabytesArrivesWhole) {
  page_ = std::string(size_t{8} << 20, 'x');
  listener_ = *HttpListener::Create("127.0.0.1:0", [this] { return page_; });
  EXPECT_EQ(Ask("GET /metrics").size() - page_.size(), Ask("HEAD /metrics").size());
}

TEST_F(HttpListenerTest, OtherRequestsAreToldWhatThereIs) {
  EXPECT_THAT(Ask("GET /"), AllOf(StartsWith("HTTP/1.1 404 "), HasSubstr("/metrics")));
  EXPECT_THAT(Ask("POST /metrics"),
              AllOf(StartsWith("HTTP/1.1 405 "), HasSubstr("Allow: GET, HEAD")));
}

TEST_F(HttpListenerTest, WhatIsNoHttpGetsNoPageAndDisturbsNoOne) {
  for (const char* noise :
       {"GET\r\n\r\n", "\x16\x03\x01 \xff\r\n\r\n", "GET /metrics SMTP\r\n\r\n"}) {
    const UniqueFd socket = Connect();
    SendAll(socket, noise);
    shutdown(socket.get(), SHUT_WR);
    EXPECT_THAT(ReadAll(socket), Not(HasSubstr(page_))) << noise;
  }
  EXPECT_THAT(Ask("GET /metrics"), EndsWith(page_));
}

TEST_F(HttpListenerTest, EndlessRequestIsCutOff) {
  const UniqueFd socket = Connect();
  SendAll(socket, std::string(HttpListener::kMaxRequestBytes + 1, 'x'));
  EXPECT_THAT(ReadAll(socket), Not(StartsWith("HTTP/1.1 200")));  // Comes to an end.
}

TEST_F(HttpListenerTest, RequestInPiecesIsWaitedForWhileOthersAreServed) {
  const UniqueFd slow = Connect();
  SendAll(slow, "GET /met");
  EXPECT_THAT(Ask("GET /metrics"), StartsWith("HTTP/1.1 200 OK\r\n"));
  SendAll(slow, "rics HTTP/1.1\r\nHost: here\r\n\r");
  EXPECT_THAT(Ask("GET /metrics"), StartsWith("HTTP/1.1 200 OK\r\n"));
  SendAll(slow, "\n");
  EXPECT_THAT(ReadAll(slow), StartsWith("HTTP/1.1 200 OK\r\n"));
}

TEST_F(HttpListenerTest, ConnectionsBeyondTheBoundWaitForOneToEnd) {
  std::vector<UniqueFd> idle;
  for (size_t i = 0; i < HttpListener::kMaxConnections; ++i) {
    idle.push_back(Connect());
  }
  const UniqueFd late = Connect();
  SendAll(late, "GET /metrics" + kToTheEnd);
  idle.pop_back();  // Closes it.
  EXPECT_THAT(ReadAll(late), StartsWith("HTTP/1.1 200 OK\r\n"));
}

TEST_F(HttpListenerTest, EndsAtOnceWhoeverIsConnected) {
  const UniqueFd idle = Connect();
  const UniqueFd halfway = Connect();
  SendAll(halfway, "GET /met");
  ASSERT_THAT(Ask("GET /metrics"), StartsWith("HTTP/1.1 200 OK\r\n"));
  const absl::Time began = Clock::System().Now();
  listener_.reset();
  // It took up to two seconds to look whether it should.
  EXPECT_LT(Clock::System().Now() - began, absl::Milliseconds(500));
  EXPECT_EQ(ReadAll(idle), "");
  EXPECT_EQ(ReadAll(halfway), "");
}

TEST_F(HttpListenerTest, AddressThatCannotBeHadIsRefusedWithTheReason) {
  const auto render = [] { return std::string(); };
  const absl::Status in_use =
      HttpListener::Create(absl::StrCat("127.0.0.1:", listener_->port()), render).status();
  EXPECT_EQ(in_use.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(in_use.message()), HasSubstr("in use"));
  EXPECT_FALSE(HttpListener::Create("127.0.0.1", render).ok());
  EXPECT_FALSE(HttpListener::Create("no.such.host.invalid:0", render).ok());
}

}  // namespace
}  // namespace crumb
