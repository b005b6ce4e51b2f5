// SPDX-License-Identifier: Apache-2.0
//
// What a scrape gives, and docs/metrics.md, which must say the same.
#include "daemon/metrics/metrics.h"

#include <fstream>
#include <map>
#include <memory>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "proto/base/clock.h"

namespace crumb {
namespace {

using testing::HasSubstr;

using Names = std::set<std::string>;

struct Family {
  std::string type;
  Names labels;
  friend bool operator==(const Family&, const Family&) = default;
};

std::ostream& operator<<(std::ostream& out, const Family& family) {
  out << family.type;
  for (const std::string& label : family.labels) {
    out << " " << label;
  }
  return out;
}

struct Exposition {
  std::map<std::string, Family> families;
  std::map<std::string, Names> label_values;
  std::map<std::string, std::string> units;  // Of the page only.
};

// Every match of the pattern's first group.
Names AllMatches(const std::string& text, const char* pattern) {
  Names names;
  const std::regex regex(pattern);
  for (std::sregex_iterator match(text.begin(), text.end(), regex), end; match != end; ++match) {
    names.insert((*match)[1]);
  }
  return names;
}

Exposition ParseScrape(const std::string& text) {
  Exposition exposition;
  static const std::regex kType(R"(# TYPE (\w+) (\w+))");
  static const std::regex kSample(R"((\w+?)(_bucket|_sum|_count)?(\{.*\})? .*)");
  static const std::regex kLabel(R"re((\w+)="([^"]*)")re");
  std::istringstream lines(text);
  std::string name;  // Samples follow their family's TYPE line.
  for (std::string line; std::getline(lines, line);) {
    std::smatch match;
    if (std::regex_match(line, match, kType)) {
      name = match[1];
      exposition.families[name].type = match[2];
    } else if (line[0] != '#' && std::regex_match(line, match, kSample)) {
      const std::string labels = match[3];
      for (std::sregex_iterator label(labels.begin(), labels.end(), kLabel), end; label != end;
           ++label) {
        if ((*label)[1] != "le") {
          exposition.families[name].labels.insert((*label)[1]);
          exposition.label_values[(*label)[1]].insert((*label)[2]);
        }
      }
    }
  }
  return exposition;
}

// The tables of docs/metrics.md.
Exposition ParsePage() {
  std::ifstream file(CRUMB_METRICS_PAGE);
  EXPECT_TRUE(file.is_open()) << CRUMB_METRICS_PAGE;
  Exposition page;
  static const std::regex kMetric(R"(\| `(crumb_\w+)` \| (\w+) \| (\w+) \|([^|]*)\| [^|]+ \|)");
  static const std::regex kValues(R"(\| `(\w+)` \|([^|]*)\|)");
  for (std::string line; std::getline(file, line);) {
    std::smatch match;
    if (std::regex_match(line, match, kMetric)) {
      EXPECT_EQ(page.families.count(match[1]), 0u) << match[1] << " is listed twice";
      page.families[match[1]] = {match[2], AllMatches(match[4], "`(\\w+)`")};
      page.units[match[1]] = match[3];
    } else if (std::regex_match(line, match, kValues)) {
      page.label_values[match[1]] = AllMatches(match[2], "`(\\w+)`");
    }
  }
  return page;
}

class MetricsTest : public testing::Test {
 protected:
  // The sample's value as it is written.
  std::string Value(const std::string& series) const {
    const std::string text = absl::StrCat("\n", metrics_.Text());
    const size_t start = text.find("\n" + series + " ");
    if (start == std::string::npos) {
      return "no series " + series;
    }
    const size_t value = start + series.size() + 2;
    return text.substr(value, text.find('\n', value) - value);
  }

  const std::unique_ptr<PageStore> store_ = *PageStore::Create(
      {.capacity_bytes = size_t{1} << 20, .chunk_bytes = size_t{1} << 16}, Clock::System());
  SessionTable sessions_;
  Metrics metrics_{*store_, sessions_, "1.2.3"};
};

TEST_F(MetricsTest, PageListsEachMetricWithItsTypeAndLabels) {
  EXPECT_EQ(ParsePage().families, ParseScrape(metrics_.Text()).families);
}

TEST_F(MetricsTest, PageListsEachLabelsValues) {
  for (int code = 1; code <= 16; ++code) {
    metrics_.OnRpc(RpcMethod::kLookup, static_cast<absl::StatusCode>(code), absl::Seconds(1));
  }
  auto exposed = ParseScrape(metrics_.Text()).label_values;
  EXPECT_EQ(exposed["version"], Names{"1.2.3"});
  exposed.erase("version");  // Any.
  EXPECT_EQ(ParsePage().label_values, exposed);
}

TEST_F(MetricsTest, NamesEndInTheirUnit) {
  for (const auto& [name, unit] : ParsePage().units) {
    for (const std::string base : {"bytes", "seconds"}) {
      const bool in_name = name.find("_" + base) != std::string::npos;
      EXPECT_EQ(in_name, unit == base) << name << " in " << unit;
    }
  }
  for (const auto& [name, family] : ParsePage().families) {
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
  metrics_.OnPageWritten(/*demoted=*/true, absl::Milliseconds(1));
  metrics_.OnChecksumFailure();
  EXPECT_EQ(metrics_.pulled_bytes(), 1024u);
  EXPECT_EQ(metrics_.checksum_failures(), 1u);
  EXPECT_EQ(Value("crumb_checksum_failures_total"), "1");
  EXPECT_EQ(Value("crumb_write_page_seconds_count{by=\"demotion\"}"), "1");
  EXPECT_EQ(Value("crumb_write_page_seconds_count{by=\"copy\"}"), "0");
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
