// SPDX-License-Identifier: Apache-2.0
#include "cuda/calibrate/report/svg.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

#include "cuda/calibrate/report/verdict.h"

namespace crumb::calibrate {
namespace {

constexpr double kWidth = 720;
constexpr double kLeft = 64;  // Room for the labels of the y axis.

std::string Open(double width, double height) {
  return absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %g %g\" width=\"%g\" "
      "height=\"%g\" role=\"img\" font-size=\"12\" fill=\"currentColor\">\n",
      width, height, width, height);
}

std::string Text(double x, double y, const char* anchor, std::string_view text) {
  return absl::StrFormat("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%s</text>\n", x, y, anchor,
                         EscapeHtml(text));
}

std::string Line(double x1, double y1, double x2, double y2) {
  return absl::StrFormat(
      "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"currentColor\" "
      "stroke-opacity=\"0.2\"/>\n",
      x1, y1, x2, y2);
}

// The plot's area and how values map into it.
struct Frame {
  double top = 12;
  double bottom = 0;
  double right = 0;
  double low = 0;  // Decades.
  double high = 0;
  double last_x = 1;

  double X(double x) const { return kLeft + (right - kLeft) * x / last_x; }
  double Y(double value) const {
    const double decade = std::clamp(std::log10(std::max(value, 1e-300)), low, high);
    return bottom - (bottom - top) * (decade - low) / (high - low);
  }
};

Frame FrameOf(const LineChartOptions& options, const std::vector<Series>& series) {
  double smallest = 1e300;
  double largest = options.smallest;
  size_t length = 1;
  for (const Series& one : series) {
    length = std::max(length, one.values.size());
    for (const double value : one.values) {
      largest = std::max(largest, value);
      smallest = value > 0 ? std::min(smallest, value) : smallest;
    }
  }
  smallest = std::clamp(smallest, options.smallest, largest);
  Frame frame;
  frame.bottom = 280;
  frame.right = options.has_legend ? kWidth - 170 : kWidth - 16;
  frame.low = std::floor(std::log10(smallest));
  frame.high = std::max(std::ceil(std::log10(largest)), frame.low + 1);
  frame.last_x = std::max<double>(1, static_cast<double>(length) - 1);
  return frame;
}

std::string Axes(const LineChartOptions& options, const Frame& frame) {
  std::string svg;
  for (int decade = static_cast<int>(frame.low); decade <= static_cast<int>(frame.high); ++decade) {
    const double y = frame.Y(std::pow(10, decade));
    absl::StrAppend(&svg, Line(kLeft, y, frame.right, y),
                    Text(kLeft - 6, y + 4, "end", absl::StrFormat("%g", std::pow(10, decade))));
  }
  const auto last_x = static_cast<size_t>(frame.last_x);
  const size_t step = std::max<size_t>(1, (last_x + 7) / 8);
  for (size_t x = 0; x <= last_x; x += step) {
    absl::StrAppend(
        &svg, Text(frame.X(static_cast<double>(x)), frame.bottom + 16, "middle", absl::StrCat(x)));
  }
  absl::StrAppend(&svg,
                  Text((kLeft + frame.right) / 2, frame.bottom + 34, "middle", options.x_label),
                  absl::StrFormat("<text transform=\"translate(14 %.1f) rotate(-90)\" "
                                  "text-anchor=\"middle\">%s</text>\n",
                                  (frame.top + frame.bottom) / 2, EscapeHtml(options.y_label)));
  return svg;
}

}  // namespace

std::string EscapeHtml(std::string_view text) {
  return absl::StrReplaceAll(
      std::string(text),
      {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}, {"'", "&#39;"}});
}

std::string RampColor(double share) {
  // Five points of matplotlib's viridis (CC0), whose lightness rises evenly.
  constexpr std::array<std::array<int, 3>, 5> kPoints = {
      {{68, 1, 84}, {59, 82, 139}, {33, 145, 140}, {94, 201, 98}, {253, 231, 37}}};
  const double at = std::clamp(share, 0.0, 1.0) * (kPoints.size() - 1);
  const auto from = std::min(static_cast<size_t>(at), kPoints.size() - 2);
  const double part = at - static_cast<double>(from);
  std::array<int, 3> color{};
  for (size_t i = 0; i < color.size(); ++i) {
    color[i] = static_cast<int>(
        std::lround(kPoints[from][i] + part * (kPoints[from + 1][i] - kPoints[from][i])));
  }
  return absl::StrFormat("#%02x%02x%02x", color[0], color[1], color[2]);
}

std::string CategoryColor(size_t i) {
  // Okabe and Ito's, told apart by the colour-blind too.
  constexpr const char* kColors[] = {"#999999", "#e69f00", "#56b4e9", "#009e73",
                                     "#0072b2", "#cc79a7", "#d55e00"};
  return kColors[i % std::size(kColors)];
}

std::string LineChart(const LineChartOptions& options, const std::vector<Series>& series) {
  const Frame frame = FrameOf(options, series);
  std::string svg = Open(kWidth, frame.bottom + 44);
  absl::StrAppend(&svg, Axes(options, frame));
  double legend_y = frame.top + 8;
  for (const Series& one : series) {
    absl::StrAppend(&svg, "<polyline fill=\"none\" stroke-width=\"1.6\" stroke=\"", one.color,
                    "\" points=\"");
    for (size_t x = 0; x < one.values.size(); ++x) {
      absl::StrAppendFormat(&svg, "%.1f,%.1f ", frame.X(static_cast<double>(x)),
                            frame.Y(one.values[x]));
    }
    absl::StrAppend(&svg, "\"><title>", EscapeHtml(one.name), "</title></polyline>\n");
    if (one.values.size() == 1) {  // A line of one point would not be seen.
      absl::StrAppendFormat(&svg, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n",
                            frame.X(0), frame.Y(one.values[0]), one.color);
    }
    if (options.has_legend) {
      absl::StrAppendFormat(&svg,
                            "<rect x=\"%.1f\" y=\"%.1f\" width=\"12\" height=\"4\" fill=\"%s\"/>\n",
                            frame.right + 14, legend_y - 6, one.color);
      absl::StrAppend(&svg, Text(frame.right + 32, legend_y, "start", one.name));
      legend_y += 18;
    }
  }
  return absl::StrCat(svg, "</svg>\n");
}

std::string HeatMap(const HeatMapOptions& options, const std::vector<double>& values) {
  const double cell_width =
      std::clamp((kWidth - kLeft) / static_cast<double>(options.num_columns), 4.0, 48.0);
  const double cell_height = std::clamp(480 / static_cast<double>(options.num_rows), 4.0, 24.0);
  const double width = kLeft + cell_width * static_cast<double>(options.num_columns);
  const double height = cell_height * static_cast<double>(options.num_rows);
  const double largest = std::max(*std::ranges::max_element(values), 1e-300);
  std::string svg = Open(std::max(width, 260.0), height + 62);
  for (size_t row = 0; row < options.num_rows; ++row) {
    const double y = height - cell_height * static_cast<double>(row + 1);
    for (size_t column = 0; column < options.num_columns; ++column) {
      const double value = values[row * options.num_columns + column];
      absl::StrAppendFormat(
          &svg,
          "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"%s\"><title>%s %d, %s "
          "%d: %s</title></rect>\n",
          kLeft + cell_width * static_cast<double>(column), y, cell_width, cell_height,
          RampColor(value / largest), EscapeHtml(options.row_name), row,
          EscapeHtml(options.column_name), column, Percent(value));
    }
    const size_t step = options.num_rows > 24 ? 4 : 1;
    if (row % step == 0) {
      absl::StrAppend(&svg, Text(kLeft - 6, y + cell_height / 2 + 4, "end", absl::StrCat(row)));
    }
  }
  for (size_t column = 0; column < options.num_columns; column += cell_width < 16 ? 8 : 1) {
    absl::StrAppend(&svg, Text(kLeft + cell_width * (static_cast<double>(column) + 0.5),
                               height + 16, "middle", absl::StrCat(column)));
  }
  absl::StrAppend(&svg,
                  Text(0, height + 36, "start",
                       absl::StrCat("up: ", options.row_name, ", right: ", options.column_name)),
                  "<text x=\"0\" y=\"", height + 54, "\"><tspan fill=\"", RampColor(0),
                  "\">&#9632;</tspan> 0 <tspan fill=\"", RampColor(1), "\">&#9632;</tspan> ",
                  Percent(largest), "</text>\n");
  return absl::StrCat(svg, "</svg>\n");
}

std::string BarChart(const std::vector<Bar>& bars) {
  constexpr double kNames = 150;
  constexpr double kRow = 24;
  constexpr double kTexts = 150;
  double largest = 1e-300;
  for (const Bar& bar : bars) {
    largest = std::max(largest, bar.value);
  }
  std::string svg = Open(kWidth, kRow * static_cast<double>(bars.size()) + 4);
  for (size_t i = 0; i < bars.size(); ++i) {
    const double y = kRow * static_cast<double>(i);
    const double length = (kWidth - kNames - kTexts) * bars[i].value / largest;
    absl::StrAppend(&svg, Text(kNames - 8, y + 16, "end", bars[i].name));
    absl::StrAppendFormat(
        &svg, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"16\" fill=\"%s\"/>\n", kNames,
        y + 3, std::max(length, 1.0), CategoryColor(i));
    absl::StrAppend(&svg, Text(kNames + length + 8, y + 16, "start", bars[i].text));
  }
  return absl::StrCat(svg, "</svg>\n");
}

}  // namespace crumb::calibrate
