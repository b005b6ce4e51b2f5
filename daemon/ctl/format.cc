// SPDX-License-Identifier: Apache-2.0
#include "daemon/ctl/format.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "proto/base/check.h"

namespace crumb {
namespace {

// Columns that a text takes: every byte of UTF-8 that begins a character.
size_t Width(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  }));
}

}  // namespace

std::string Count(uint64_t number) {
  const std::string digits = std::to_string(number);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) {
      text.push_back(',');
    }
    text.push_back(digits[i]);
  }
  return text;
}

std::string Bytes(uint64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1023.95 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? absl::StrCat(bytes, " B") : absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string Seconds(double seconds) {
  if (seconds < 1) {
    return absl::StrFormat("%.0f ms", seconds * 1e3);
  }
  const auto whole = static_cast<uint64_t>(seconds);
  if (whole < 60) {
    return absl::StrCat(whole, " s");
  }
  if (whole < 3600) {
    return absl::StrCat(whole / 60, " m ", whole % 60, " s");
  }
  if (whole < 86400) {
    return absl::StrCat(whole / 3600, " h ", whole % 3600 / 60, " m");
  }
  return absl::StrCat(whole / 86400, " d ", whole % 86400 / 3600, " h");
}

std::string Percent(uint64_t part, uint64_t whole) {
  return whole == 0 ? "-"
                    : absl::StrFormat("%.1f %%", 100.0 * static_cast<double>(part) /
                                                     static_cast<double>(whole));
}

std::string Ratio(uint64_t whole, uint64_t part) {
  return part == 0
             ? "-"
             : absl::StrFormat("%.1fx", static_cast<double>(whole) / static_cast<double>(part));
}

std::string Rate(double per_second) {
  return per_second < 100 ? absl::StrFormat("%.1f", per_second)
                          : Count(static_cast<uint64_t>(std::llround(per_second)));
}

std::string Hex(std::string_view bytes, size_t max_bytes) {
  std::string text;
  for (const char byte : bytes.substr(0, max_bytes)) {
    absl::StrAppendFormat(&text, "%02x", static_cast<unsigned char>(byte));
  }
  return text;
}

std::string Printable(std::string_view text) {
  std::string shown;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : 0);
    if (byte < 0x20 || byte == 0x7f) {
      absl::StrAppendFormat(&shown, "\\x%02x", byte);
    } else if (byte == 0xc2 && next >= 0x80 && next < 0xa0) {  // U+0080 to U+009F.
      absl::StrAppendFormat(&shown, "\\x%02x", next);
      ++i;
    } else {
      shown.push_back(text[i]);
    }
  }
  return shown;
}

void Table::AddRow(std::vector<std::string> cells) {
  CRUMB_CHECK(cells.size() == columns_.size(), "one cell a column");
  for (std::string& cell : cells) {
    cell = Printable(cell);
  }
  rows_.push_back(std::move(cells));
}

void Table::Print(std::ostream& out) const {
  if (rows_.empty()) {
    return;
  }
  std::vector<std::string> titles;
  std::vector<size_t> widths;
  for (size_t i = 0; i < columns_.size(); ++i) {
    titles.push_back(columns_[i].title);
    widths.push_back(Width(columns_[i].title));
    for (const std::vector<std::string>& row : rows_) {
      widths[i] = std::max(widths[i], Width(row[i]));
    }
  }
  const auto print_row = [&](const std::vector<std::string>& cells) {
    std::string line;
    for (size_t i = 0; i < cells.size(); ++i) {
      const std::string padding(widths[i] - Width(cells[i]), ' ');
      const bool left = columns_[i].align == Align::kLeft;
      absl::StrAppend(&line, i == 0 ? "" : "  ", left ? cells[i] : padding,
                      left ? padding : cells[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out << line << "\n";
  };
  print_row(titles);
  for (const std::vector<std::string>& row : rows_) {
    print_row(row);
  }
}

}  // namespace crumb
