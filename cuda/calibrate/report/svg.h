// SPDX-License-Identifier: Apache-2.0
//
// Three kinds of plots as inline SVG: text and axes take the page's colour, tooltips are <title>s,
// nothing is loaded from elsewhere. Thread-safe.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace crumb::calibrate {

// Fit for an element's text or an attribute in double quotes.
std::string EscapeHtml(std::string_view text);

// From dark blue over green to yellow, `share` from 0 to 1: "#21918c".
std::string RampColor(double share);
// Of the i-th of a few things that must be told apart.
std::string CategoryColor(size_t i);

struct Series {
  std::string name;
  std::string color;
  std::vector<double> values;  // At x = 0, 1, ...
};

struct LineChartOptions {
  std::string x_label;
  std::string y_label;
  bool has_legend = true;
  double smallest = 1e-6;  // Of what is shown: smaller values, and zero, lie on the floor.
};
// Lines over a logarithmic y axis. At least one series with a value.
std::string LineChart(const LineChartOptions& options, const std::vector<Series>& series);

struct HeatMapOptions {
  size_t num_rows = 0;
  size_t num_columns = 0;
  std::string row_name;     // "layer"
  std::string column_name;  // "KV head"
};
// `values` [rows, columns], none negative; colours from zero to the largest, rows upwards.
std::string HeatMap(const HeatMapOptions& options, const std::vector<double>& values);

struct Bar {
  std::string name;
  double value = 0;
  std::string text;  // Beside the bar.
};
// Horizontal, from zero to the largest.
std::string BarChart(const std::vector<Bar>& bars);

}  // namespace crumb::calibrate
