// SPDX-License-Identifier: Apache-2.0
//
// The two macros that this version of Abseil lacks, under their upstream names' meaning.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Returns from the calling function with the status of `expression` unless it is OK.
#define CRUMB_RETURN_IF_ERROR(expression)                               \
  do {                                                                  \
    if (absl::Status crumb_status = (expression); !crumb_status.ok()) { \
      return crumb_status;                                              \
    }                                                                   \
  } while (false)

// Assigns the value of the StatusOr `expression` to `target`, a declaration or an lvalue, or
// returns its status.
// NOLINTBEGIN(bugprone-macro-parentheses): a declaration cannot stand in parentheses.
#define CRUMB_ASSIGN_OR_RETURN(target, expression) \
  CRUMB_INTERNAL_ASSIGN(CRUMB_INTERNAL_CONCAT(crumb_status_or_, __LINE__), target, expression)
#define CRUMB_INTERNAL_ASSIGN(temporary, target, expression) \
  auto temporary = (expression);                             \
  if (!temporary.ok()) {                                     \
    return std::move(temporary).status();                    \
  }                                                          \
  target = *std::move(temporary)
#define CRUMB_INTERNAL_CONCAT(a, b) CRUMB_INTERNAL_CONCAT_NOW(a, b)
#define CRUMB_INTERNAL_CONCAT_NOW(a, b) a##b
// NOLINTEND(bugprone-macro-parentheses)
