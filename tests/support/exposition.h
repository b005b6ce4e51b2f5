// SPDX-License-Identifier: Apache-2.0
//
// Prometheus' text format, and docs/metrics.md, as tests compare them.
#pragma once

#include <map>
#include <optional>
#include <ostream>
#include <set>
#include <string>

namespace crumb {

using Names = std::set<std::string>;

struct MetricShape {
  std::string type;
  Names labels;
  friend bool operator==(const MetricShape&, const MetricShape&) = default;
};
std::ostream& operator<<(std::ostream& out, const MetricShape& shape);

struct Exposition {
  std::map<std::string, MetricShape> families;
  std::map<std::string, Names> label_values;
  std::map<std::string, std::string> units;  // Of the page only.
};

Exposition ParseScrape(const std::string& text);
// The tables of docs/metrics.md. Aborts when the file is not there.
Exposition ParseMetricsPage();

// The value of a series as it is written, such as `crumb_rpcs_total{method="Lookup",code="OK"}`.
std::optional<std::string> SampleOf(const std::string& text, const std::string& series);

}  // namespace crumb
