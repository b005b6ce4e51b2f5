// SPDX-License-Identifier: Apache-2.0
#include "daemon/server/units.h"

#include <arpa/inet.h>

#include <array>
#include <charconv>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace crumb {
namespace {

constexpr std::array<std::pair<std::string_view, uint64_t>, 4> kUnits = {{
    {"KiB", uint64_t{1} << 10},
    {"MiB", uint64_t{1} << 20},
    {"GiB", uint64_t{1} << 30},
    {"TiB", uint64_t{1} << 40},
}};

absl::string_view View(std::string_view text) {
  return {text.data(), text.size()};
}

absl::Status Wrong(std::string_view text, absl::string_view expected) {
  return absl::InvalidArgumentError(absl::StrCat("\"", View(text), "\" is no ", expected));
}

// All of `text` as digits of `base`.
std::optional<uint64_t> Digits(std::string_view text, int base) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) {
    return std::nullopt;
  }
  return value;
}

}  // namespace

absl::StatusOr<uint64_t> ParseBytes(std::string_view text) {
  uint64_t factor = 1;
  std::string_view number = text;
  for (const auto& [unit, bytes] : kUnits) {
    if (text.ends_with(unit)) {
      factor = bytes;
      number.remove_suffix(unit.size());
    }
  }
  const std::optional<uint64_t> count = Digits(number, 10);
  if (!count.has_value() || *count > std::numeric_limits<int64_t>::max() / factor) {
    return Wrong(text, "size: write a number of bytes, or with KiB, MiB, GiB or TiB, as in 4GiB");
  }
  return *count * factor;
}

std::string FormatBytes(uint64_t bytes) {
  for (auto unit = kUnits.rbegin(); unit != kUnits.rend(); ++unit) {
    if (bytes != 0 && bytes % unit->second == 0) {
      return absl::StrCat(bytes / unit->second, View(unit->first));
    }
  }
  return absl::StrCat(bytes);
}

absl::StatusOr<absl::Duration> ParseDurationText(std::string_view text) {
  absl::Duration duration;
  if (!absl::ParseDuration(View(text), &duration) || duration <= absl::ZeroDuration() ||
      duration == absl::InfiniteDuration()) {
    return Wrong(text, "time: write a positive number with ms, s, m or h, as in 30s");
  }
  return duration;
}

absl::StatusOr<uint32_t> ParseMode(std::string_view text) {
  const std::optional<uint64_t> mode = Digits(text, 8);
  if (!mode.has_value() || *mode > 0777) {
    return Wrong(text, "file mode: write permissions in octal, as in 0660");
  }
  return static_cast<uint32_t>(*mode);
}

std::string FormatMode(uint32_t mode) {
  return absl::StrFormat("%04o", mode);
}

absl::StatusOr<uint64_t> ParseNumber(std::string_view text, uint64_t min, uint64_t max) {
  const std::optional<uint64_t> number = Digits(text, 10);
  if (!number.has_value() || *number < min || *number > max) {
    return Wrong(text, absl::StrCat("whole number from ", min, " to ", max));
  }
  return *number;
}

absl::StatusOr<bool> ParseFlag(std::string_view text) {
  if (text != "true" && text != "false") {
    return Wrong(text, "truth value: write true or false");
  }
  return text == "true";
}

absl::StatusOr<HostPort> ParseHostPort(std::string_view text) {
  const size_t colon = text.rfind(':');
  const std::optional<uint64_t> port =
      colon == std::string_view::npos ? std::nullopt : Digits(text.substr(colon + 1), 10);
  std::string_view host = text.substr(0, colon == std::string_view::npos ? 0 : colon);
  const bool in_brackets = host.size() > 2 && host.starts_with('[') && host.ends_with(']');
  if (in_brackets) {
    host = host.substr(1, host.size() - 2);
  }
  // IPv6 without brackets, and brackets around nothing.
  const bool is_malformed = !in_brackets && host.find_first_of(":[]") != std::string_view::npos;
  if (host.empty() || is_malformed || !port.has_value() || *port > 65535) {
    return Wrong(text, "address: write host:port, as in 127.0.0.1:7070 or [::1]:7070");
  }
  return HostPort{std::string(host), static_cast<uint16_t>(*port)};
}

bool IsIpAddress(std::string_view host) {
  const std::string text(host);
  in_addr v4{};
  in6_addr v6{};
  return inet_pton(AF_INET, text.c_str(), &v4) == 1 || inet_pton(AF_INET6, text.c_str(), &v6) == 1;
}

bool IsLoopback(std::string_view host) {
  // A name such as 127.example.com is whatever its resolver says.
  return host == "localhost" || host == "::1" || (host.starts_with("127.") && IsIpAddress(host));
}

}  // namespace crumb
