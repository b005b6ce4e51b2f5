// SPDX-License-Identifier: Apache-2.0
#include "daemon/log/log.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "spdlog/pattern_formatter.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace crumb {
namespace {

std::atomic<LogFormat> g_format{LogFormat::kText};

spdlog::level::level_enum SpdlogLevel(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
    case LogLevel::kOff:
      break;
  }
  return spdlog::level::off;
}

// In double quotes, as JSON has it. Bytes from 0x80 on pass: texts come from protobuf, TOML and the
// system, which hand over UTF-8.
void AppendQuoted(std::string_view text, std::string& line) {
  line.push_back('"');
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      line.push_back('\\');
      line.push_back(c);
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      absl::StrAppendFormat(&line, "\\u%04x", static_cast<unsigned>(c));
    } else {
      line.push_back(c);
    }
  }
  line.push_back('"');
}

bool NeedsQuotes(std::string_view text) {
  return text.empty() || std::any_of(text.begin(), text.end(), [](char c) {
           return c <= ' ' || c == '"' || c == '\\' || c == '=' || c == 0x7f;
         });
}

void SetPattern(spdlog::logger& logger, LogFormat format) {
  const char* pattern = format == LogFormat::kJson
                            ? R"({"time":"%Y-%m-%dT%H:%M:%S.%eZ","level":"%l",%v})"
                            : "%Y-%m-%dT%H:%M:%S.%eZ %l %v";
  logger.set_formatter(
      std::make_unique<spdlog::pattern_formatter>(pattern, spdlog::pattern_time_type::utc));
}

// One logger for the process, made by its first user and never destroyed: threads may log to the
// last.
spdlog::logger& Logger() {
  static spdlog::logger* const kLogger = [] {
    // shared: spdlog's way to hand over a sink.
    auto* made = new spdlog::logger("crumbd", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->flush_on(spdlog::level::debug);
    SetPattern(*made, LogFormat::kText);
    return made;
  }();
  return *kLogger;
}

}  // namespace

LogField::LogField(std::string_view name, double number)
    : key(name), value(absl::StrFormat("%.6g", number)), is_literal(true) {}

LogField::LogField(std::string_view name, const absl::Status& status)
    : key(name), value(status.ToString(absl::StatusToStringMode::kWithNoExtraData)) {}

void InitLog(LogLevel level, LogFormat format) {
  g_format = format;
  SetPattern(Logger(), format);
  Logger().set_level(SpdlogLevel(level));
}

std::string FormatLogEvent(LogFormat format,
                           std::string_view event,
                           std::initializer_list<LogField> fields) {
  std::string line;
  if (format == LogFormat::kJson) {
    line = "\"event\":";
    AppendQuoted(event, line);
  } else {
    line = event;
  }
  for (const LogField& field : fields) {
    if (format == LogFormat::kJson) {
      line.push_back(',');
      AppendQuoted(field.key, line);
      line.push_back(':');
    } else {
      line.push_back(' ');
      line += field.key;
      line.push_back('=');
    }
    const bool bare = field.is_literal || (format == LogFormat::kText && !NeedsQuotes(field.value));
    if (bare) {
      line += field.value;
    } else {
      AppendQuoted(field.value, line);
    }
  }
  return line;
}

void LogEvent(LogLevel level, std::string_view event, std::initializer_list<LogField> fields) {
  spdlog::logger& logger = Logger();
  const spdlog::level::level_enum spdlog_level = SpdlogLevel(level);
  if (logger.should_log(spdlog_level)) {
    logger.log(spdlog_level, FormatLogEvent(g_format, event, fields));
  }
}

}  // namespace crumb
