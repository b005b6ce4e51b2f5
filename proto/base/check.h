// SPDX-License-Identifier: Apache-2.0
//
// Assertions for programmer errors and for invariants between subsystems, never for input. A failed
// check prints the place, the condition and a message, and aborts.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CRUMB_CHECK(condition, message)                                                     \
  do {                                                                                      \
    if (!(condition)) [[unlikely]] {                                                        \
      std::fprintf(stderr, "%s:%d: check failed: %s: %s\n", __FILE__, __LINE__, #condition, \
                   message);                                                                \
      std::abort();                                                                         \
    }                                                                                       \
  } while (false)

// On hot paths: compiled out with NDEBUG, and then not evaluated.
#ifdef NDEBUG
#define CRUMB_DCHECK(condition, message)    \
  do {                                      \
    static_cast<void>(sizeof((condition))); \
  } while (false)
#else
#define CRUMB_DCHECK(condition, message) CRUMB_CHECK(condition, message)
#endif
