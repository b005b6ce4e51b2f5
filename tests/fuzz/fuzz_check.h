// SPDX-License-Identifier: Apache-2.0
//
// How a fuzzer says that something does not hold: by the end of the process.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "absl/status/status.h"

namespace crumb {

inline void Require(bool condition, const char* what) {
  if (!condition) {
    std::fprintf(stderr, "%s\n", what);
    std::abort();
  }
}

inline void CheckRefusal(const absl::Status& status) {
  Require(status.code() == absl::StatusCode::kInvalidArgument, "refused with another code");
  Require(!status.message().empty(), "refused without a reason");
}

}  // namespace crumb
