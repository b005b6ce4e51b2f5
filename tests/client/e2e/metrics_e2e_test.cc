// SPDX-License-Identifier: Apache-2.0
//
// A scrape of a real crumbd over HTTP: that it says what docs/metrics.md lists, and what engines
// did, and that neither a scraper nor an idle engine holds the daemon's end up.
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "proto/base/unique_fd.h"
#include "tests/client/e2e/client_fixture.h"
#include "tests/support/exposition.h"
#include "tests/support/raw_http.h"

namespace crumb {
namespace {

using testing::Optional;
using testing::StartsWith;

class MetricsE2eTest : public ClientTest {
 protected:
  uint16_t port() const { return static_cast<uint16_t>(daemon_->ReadyNumber("metrics_port")); }
  // The page, without HTTP's header.
  std::string Scrape() const {
    const std::string all = AskHttp(port(), "GET /metrics HTTP/1.1\r\nHost: crumbd\r\n\r\n");
    EXPECT_THAT(all, StartsWith("HTTP/1.1 200 OK\r\n"));
    return all.substr(all.find("\r\n\r\n") + 4);
  }
};

TEST_F(MetricsE2eTest, ScrapeSaysJustWhatThePageLists) {
  StartDaemon();
  EXPECT_EQ(ParseScrape(Scrape()).families, ParseMetricsPage().families);
}

TEST_F(MetricsE2eTest, ValuesFollowWhatEnginesDo) {
  StartDaemon();
  EXPECT_THAT(SampleOf(Scrape(), "crumb_sessions"), Optional(std::string("0")));
  const auto client = NewClient();
  ASSERT_TRUE(client->Publish(*Prefill(512), std::span(prompt_).first(512), {}).ok());
  const auto prefix = client->Lookup(std::span(prompt_).first(513), {});
  ASSERT_TRUE(prefix.ok()) << prefix.status();
  ASSERT_EQ((*prefix)->usable_tokens(), 512u);

  const std::string text = Scrape();
  const std::pair<const char*, const char*> expected[] = {
      {"crumb_sessions", "1"},
      {"crumb_lookups_total", "1"},
      {"crumb_lookup_tokens_total", "513"},
      {"crumb_hit_tokens_total", "512"},
      {"crumb_usable_tokens_total", "512"},
      {"crumb_published_pages_total", "8"},
      {"crumb_publishes_total{result=\"committed\"}", "1"},
      {"crumb_pages{encoding=\"int2\"}", "7"},
      {"crumb_leases_granted_total", "1"},
      {"crumb_leases", "1"},
      {"crumb_publishes", "0"},
      {"crumb_rpcs_total{code=\"OK\",method=\"Lookup\"}", "1"},
      {"crumb_rpcs_total{code=\"OK\",method=\"CommitPublish\"}", "1"},
      {"crumb_rpc_seconds_count{method=\"Lookup\"}", "1"},
      {"crumb_wrong_secrets_total", "0"},
      {"crumb_checksum_failures_total", "0"},
      {"crumb_draining", "0"},
  };
  for (const auto& [series, value] : expected) {
    EXPECT_THAT(SampleOf(text, series), Optional(std::string(value))) << series;
  }
}

TEST_F(MetricsE2eTest, DaemonWithNothingInFlightStopsAtOnce) {
  StartDaemon();
  const auto client = NewClient();                   // Attached, and idle.
  const UniqueFd scraper = ConnectLoopback(port());  // Connected, and silent.
  Scrape();
  const absl::Time began = Clock::System().Now();
  const auto status = daemon_->Stop();
  // gRPC's grace for connections that stay open is 100 ms; the rest is room for a busy machine.
  EXPECT_LT(Clock::System().Now() - began, absl::Seconds(1));
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_EQ(*status, 0);
}

}  // namespace
}  // namespace crumb
