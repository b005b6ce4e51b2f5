// SPDX-License-Identifier: Apache-2.0
//
// The daemon's log: one line an event, on standard error, as key=value text or as JSON. An event is
// logged once, by whoever decides it; callers that pass an error on do not log it again.
//
//   LogEvent(LogLevel::kInfo, "session_attached", {{"session", 7}, {"client", "engine 0"}});
//   2026-01-31T12:00:00.000Z info session_attached session=7 client="engine 0"
//   {"time":"2026-01-31T12:00:00.000Z","level":"info","event":"session_attached","session":7,...}
//
// Values come from clients too: whatever could end a line or a string is escaped.
#pragma once

#include <concepts>
#include <initializer_list>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace crumb {

enum class LogLevel { kDebug, kInfo, kWarning, kError, kOff };
enum class LogFormat { kText, kJson };

// One key and its value. The key is a literal of [a-z_].
struct LogField {
  LogField(std::string_view name, std::string_view text) : key(name), value(text) {}
  LogField(std::string_view name, const char* text) : key(name), value(text) {}
  LogField(std::string_view name, const std::string& text) : key(name), value(text) {}
  LogField(std::string_view name, bool flag)
      : key(name), value(flag ? "true" : "false"), is_literal(true) {}
  LogField(std::string_view name, std::integral auto number)
      : key(name), value(std::to_string(number)), is_literal(true) {}
  LogField(std::string_view name, double number);
  // "NOT_FOUND: no such profile".
  LogField(std::string_view name, const absl::Status& status);

  std::string_view key;
  std::string value;
  bool is_literal = false;  // A number or a truth value: without quotes.
};

// Before the first event and before other threads; without it, text from kInfo on.
void InitLog(LogLevel level, LogFormat format);

// Thread-safe. Blocks for as long as standard error does.
void LogEvent(LogLevel level, std::string_view event, std::initializer_list<LogField> fields = {});

// The line of an event in `format`, without time and level. For LogEvent, and tests.
std::string FormatLogEvent(LogFormat format,
                           std::string_view event,
                           std::initializer_list<LogField> fields);

}  // namespace crumb
