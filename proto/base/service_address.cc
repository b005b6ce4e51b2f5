// SPDX-License-Identifier: Apache-2.0
#include "proto/base/service_address.h"

#include <sys/un.h>

#include <cstddef>
#include <cstdint>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace crumb {
namespace {

absl::Status CheckSocketPath(absl::string_view path) {
  constexpr size_t kMaxBytes = sizeof(sockaddr_un::sun_path) - 1;
  if (path.empty()) {
    return absl::InvalidArgumentError(
        "address \"unix:\" names no socket: write its path behind it, as in "
        "unix:/run/crumb/crumbd.sock");
  }
  if (path.size() > kMaxBytes) {
    return absl::InvalidArgumentError(absl::StrCat("address unix:", path, ": the path has ",
                                                   path.size(), " bytes, the system allows ",
                                                   kMaxBytes, ": give the socket a shorter one"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckServiceAddress(absl::string_view address) {
  constexpr absl::string_view kUnix = "unix:";
  if (absl::StartsWith(address, kUnix)) {
    return CheckSocketPath(address.substr(kUnix.size()));
  }
  const size_t colon = address.rfind(':');
  uint32_t port = 0;
  if (colon != absl::string_view::npos && colon > 0 &&
      absl::SimpleAtoi(address.substr(colon + 1), &port) && port >= 1 && port <= 65535) {
    return absl::OkStatus();
  }
  if (absl::StartsWith(address, "/") || absl::StartsWith(address, ".")) {
    return absl::InvalidArgumentError(
        absl::StrCat("address ", address, " is a path: write unix:", address));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("address \"", address,
                   "\" is neither unix:PATH nor HOST:PORT with a port from 1 to 65535, as in "
                   "unix:/run/crumb/crumbd.sock or 127.0.0.1:7070"));
}

}  // namespace crumb
