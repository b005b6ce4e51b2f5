// SPDX-License-Identifier: Apache-2.0
//
// Values of the configuration as people write them. Parsers return INVALID_ARGUMENT with the value
// and how to write it; formatters give text that parses to the same value.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace crumb {

// "4GiB", "64MiB", "512KiB", "1TiB", or a number of bytes.
absl::StatusOr<uint64_t> ParseBytes(std::string_view text);
std::string FormatBytes(uint64_t bytes);

// "30s", "500ms", "1h30m". Positive and finite.
absl::StatusOr<absl::Duration> ParseDurationText(std::string_view text);

// "0660": permissions in octal.
absl::StatusOr<uint32_t> ParseMode(std::string_view text);
std::string FormatMode(uint32_t mode);

// A whole number in [min, max].
absl::StatusOr<uint64_t> ParseNumber(std::string_view text, uint64_t min, uint64_t max);
// "true" or "false".
absl::StatusOr<bool> ParseFlag(std::string_view text);

// Of the "host:port" (IPv6 in brackets) that an address is. `host` is without brackets.
struct HostPort {
  std::string host;
  uint16_t port = 0;
};
absl::StatusOr<HostPort> ParseHostPort(std::string_view text);
// Whether the host is an IPv4 or IPv6 address in digits, without brackets.
bool IsIpAddress(std::string_view host);
// Whether the host names this machine to itself: 127.0.0.0/8, ::1 or localhost.
bool IsLoopback(std::string_view host);

}  // namespace crumb
