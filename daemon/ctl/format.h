// SPDX-License-Identifier: Apache-2.0
//
// Figures and tables for people to read in a terminal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

namespace crumb {

// "1,234,567".
std::string Count(uint64_t number);
// "1.5 GiB", "512 B": three digits or so.
std::string Bytes(uint64_t bytes);
// "850 ms", "42 s", "3 m 12 s", "5 h 4 m", "2 d 3 h".
std::string Seconds(double seconds);
// "83.1 %"; "-" when the whole is 0.
std::string Percent(uint64_t part, uint64_t whole);
// "9.1x"; "-" when the part is 0.
std::string Ratio(uint64_t whole, uint64_t part);
// "12.3" below 100, "1,234" above.
std::string Rate(double per_second);

// Lower-case hexadecimal of bytes; of the first `max_bytes` of them.
std::string Hex(std::string_view bytes, size_t max_bytes = 64);

// A name that a client chose, for a terminal: control characters, which could move the cursor or
// forge a line, as "\x1b". The rest stays, UTF-8 too.
std::string Printable(std::string_view text);

// Columns as wide as their widest cell, two blanks between them. Thread-compatible.
class Table {
 public:
  enum class Align { kLeft, kRight };
  struct Column {
    std::string title;
    Align align = Align::kRight;
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  // As many cells as columns. Shown as Printable has them.
  void AddRow(std::vector<std::string> cells);
  // The titles and the rows; nothing without rows.
  void Print(std::ostream& out) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace crumb
