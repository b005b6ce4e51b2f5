// SPDX-License-Identifier: Apache-2.0
#include "tests/support/exposition.h"

#include <fstream>
#include <regex>
#include <sstream>

#include "proto/base/check.h"

namespace crumb {
namespace {

// Every match of the pattern's first group.
Names AllMatches(const std::string& text, const char* pattern) {
  Names names;
  const std::regex regex(pattern);
  for (std::sregex_iterator match(text.begin(), text.end(), regex), end; match != end; ++match) {
    names.insert((*match)[1]);
  }
  return names;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const MetricShape& shape) {
  out << shape.type;
  for (const std::string& label : shape.labels) {
    out << " " << label;
  }
  return out;
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

Exposition ParseMetricsPage() {
  std::ifstream file(CRUMB_METRICS_PAGE);
  CRUMB_CHECK(file.is_open(), CRUMB_METRICS_PAGE);
  Exposition page;
  static const std::regex kMetric(R"(\| `(crumb_\w+)` \| (\w+) \| (\w+) \|([^|]*)\| [^|]+ \|)");
  static const std::regex kValues(R"(\| `(\w+)` \|([^|]*)\|)");
  for (std::string line; std::getline(file, line);) {
    std::smatch match;
    if (std::regex_match(line, match, kMetric)) {
      CRUMB_CHECK(page.families.count(match[1]) == 0, "a metric is listed once");
      page.families[match[1]] = {match[2], AllMatches(match[4], "`(\\w+)`")};
      page.units[match[1]] = match[3];
    } else if (std::regex_match(line, match, kValues)) {
      page.label_values[match[1]] = AllMatches(match[2], "`(\\w+)`");
    }
  }
  return page;
}

std::optional<std::string> SampleOf(const std::string& text, const std::string& series) {
  const std::string line = "\n" + series + " ";
  const size_t start = ("\n" + text).find(line);
  if (start == std::string::npos) {
    return std::nullopt;
  }
  const size_t value = start + line.size() - 1;  // Without the newline put before the text.
  return text.substr(value, text.find('\n', value) - value);
}

}  // namespace crumb
