// SPDX-License-Identifier: Apache-2.0
//
// For benchmarks, which have no one to return an error to: ends the program with what went wrong.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "proto/base/check.h"

namespace crumb {

inline void Must(const absl::Status& status) {
  CRUMB_CHECK(status.ok(), status.ToString().c_str());
}

template <typename T>
T Must(absl::StatusOr<T> value) {
  Must(value.status());
  return *std::move(value);
}

}  // namespace crumb
