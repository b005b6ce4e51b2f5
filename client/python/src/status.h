// SPDX-License-Identifier: Apache-2.0
//
// Statuses as Python's exceptions. The only place where this project throws: nanobind carries
// errors in no other way.
#pragma once

#include <exception>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace crumb::python {

// Carries a status to the translator that RegisterStatusError installs. May be thrown without the
// interpreter's lock.
class StatusError : public std::exception {
 public:
  explicit StatusError(const absl::Status& status)
      : code_(status.code()), message_(status.message()) {}
  absl::StatusCode code() const { return code_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  absl::StatusCode code_;
  std::string message_;
};

// INVALID_ARGUMENT and FAILED_PRECONDITION become ValueError, NOT_FOUND FileNotFoundError, INTERNAL
// RuntimeError, and the rest, which come from the system, OSError. Once a module.
void RegisterStatusError();

inline void ThrowIfError(const absl::Status& status) {
  if (!status.ok()) {
    throw StatusError(status);  // throws: the edge of Python.
  }
}

template <typename T>
T ValueOrThrow(absl::StatusOr<T> value) {
  ThrowIfError(value.status());
  return *std::move(value);
}

}  // namespace crumb::python
