// SPDX-License-Identifier: Apache-2.0
//
// What a scrape gives, and docs/metrics.md, which must say the same.
#include "daemon/metrics/metrics.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "proto/base/clock.h"
#include "tests/support/exposition.h"

namespace crumb {
namespace {

using testing::HasSubstr;

class MetricsTest : public testing::Test {
 protected:
  // The sample's value as it is written.
  std::string Value(const std::string& series) const {
    return SampleOf(metrics_.Text(), series).value_or("no series " + series);
  }

  const std::unique_ptr<PageStore> store_ = *PageStore::Create(
      {.capacity_bytes = size_t{1} << 20, .chunk_bytes = size_t{1} << 16}, Clock::System());
  SessionTable sessions_;
  Metrics metrics_{*store_, sessions_, "1.2.3"};
};

TEST_F(MetricsTest, PageListsEachMetricWithItsTypeAndLabels) {
  EXPECT_EQ(ParseMetricsPage().families, ParseScrape(metrics_.Text()).families);
}

TEST_F(MetricsTest, PageListsEachLabelsValues) {
  for (int code = 1; code <= 16; ++code) {
    metrics_.OnRpc(RpcMethod::kLookup, static_cast<absl::StatusCode>(code), absl::Seconds(1));
  }
  auto exposed = ParseScrape(metrics_.Text()).label_values;
  EXPECT_EQ(exposed["version"], Names{"1.2.3"});
  exposed.erase("version");  // Any.
  EXPECT_EQ(ParseMetricsPage().label_values, exposed);
}

TEST_F(MetricsTest, NamesEndInTheirUnit) {
  for (const auto& [name, unit] : ParseMetricsPage().units) {
    for (const std::string base : {"bytes", "seconds"}) {
      const bool in_name = name.find("_" + base) != std::string::npos;
      EXPECT_EQ(in_name, unit == base) << name << " in " << unit;
    }
  }
  for (const auto& [name, family] : ParseMetricsPage().families) {
    const bool is_total = name.size() > 6 && name.substr(name.size() - 6) == "_total";
    EXPECT_EQ(is_total, family.type == "counter") << name;
  }
}

TEST_F(MetricsTest, CallsAreCountedByMethodAndCode) {
  metrics_.OnRpc(RpcMethod::kProbe, absl::StatusCode::kOk, absl::Milliseconds(2));
  metrics_.OnRpc(RpcMethod::kProbe, absl::StatusCode::kDataLoss, absl::Milliseconds(3));
  metrics_.OnRpc(RpcMethod::kProbe, static_cast<absl::StatusCode>(99), absl::Milliseconds(3));
  const Exposition scrape = ParseScrape(metrics_.Text());
  EXPECT_EQ(scrape.label_values.at("code"), (Names{"OK", "DATA_LOSS", "UNKNOWN"}));
  EXPECT_EQ(Value("crumb_rpc_seconds_count{method=\"Probe\"}"), "3");
}

TEST_F(MetricsTest, TransfersAndWrittenPagesAreCounted) {
  metrics_.OnPulled(1000, absl::Milliseconds(5));
  metrics_.OnPulled(24, absl::Milliseconds(5));
  metrics_.OnPageWritten(PageWork::kDemotedOnCpu, absl::Milliseconds(1));
  metrics_.OnPageWritten(PageWork::kDemotedOnGpu, absl::Milliseconds(1));
  EXPECT_EQ(metrics_.OnGpuDemotionFailure(), 1u);
  EXPECT_EQ(metrics_.OnGpuDemotionFailure(), 2u);
  metrics_.OnChecksumFailure();
  EXPECT_EQ(metrics_.pulled_bytes(), 1024u);
  EXPECT_EQ(metrics_.checksum_failures(), 1u);
  EXPECT_EQ(Value("crumb_checksum_failures_total"), "1");
  EXPECT_EQ(Value("crumb_write_page_seconds_count{by=\"cpu_demotion\"}"), "1");
  EXPECT_EQ(Value("crumb_write_page_seconds_count{by=\"gpu_demotion\"}"), "1");
  EXPECT_EQ(Value("crumb_write_page_seconds_count{by=\"copy\"}"), "0");
  EXPECT_EQ(Value("crumb_gpu_demotion_failures_total"), "2");
}

TEST_F(MetricsTest, RequestsWithoutTheirSessionsSecretAreCounted) {
  const SessionSecret secret = MakeSessionSecret();
  sessions_.Add(SessionId(1), secret);
  EXPECT_TRUE(sessions_.Authenticate(SessionId(1), secret).ok());
  EXPECT_EQ(Value("crumb_wrong_secrets_total"), "0");
  EXPECT_FALSE(sessions_.Authenticate(SessionId(1), MakeSessionSecret()).ok());
  EXPECT_EQ(Value("crumb_wrong_secrets_total"), "1");
}

TEST_F(MetricsTest, AddressInUseIsNamedWithTheRemedy) {
  const auto port = metrics_.Listen("127.0.0.1:0");
  ASSERT_TRUE(port.ok()) << port.status();
  ASSERT_NE(*port, 0);
  Metrics other(*store_, sessions_, "1.2.3");
  const std::string address = absl::StrCat("127.0.0.1:", *port);
  const absl::Status status = other.Listen(address).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr(address));
  EXPECT_THAT(std::string(status.message()), HasSubstr("[listen] metrics"));
}

}  // namespace
}  // namespace crumb
