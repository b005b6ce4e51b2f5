// SPDX-License-Identifier: Apache-2.0
//
// A GPU in host memory: all of crumb::gpu, its ops by their readable twins, so that tests of what
// uses a GPU run where there is none. Linked into a test (crumb::fake_gpu), it takes the place of
// the library's own.
//
// Work is done late, as on a GPU: all of it in the order in which it was enqueued, but only when
// somebody waits for it. So tables that are written again too early, or a page that is used before
// its turn, show. New memory is full of NaN, but for what processes share, which is zero.
//
// Any call can be made to fail, as on a device that has no memory left. All of it is confined to
// the test's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"

namespace crumb {

class FakeGpu {
 public:
  using Work = std::function<void()>;

  // Of the calls that a device can refuse, the `nth` from now on (0: the next) fails, once:
  // RESOURCE_EXHAUSTED, and nothing of it is done. A wait that fails has waited.
  static void FailCall(uint64_t nth);
  // Whether it has come to that. The fault is taken back if it has not.
  static bool TakeFailed();
  // Memory of the device, and pinned memory, that has not been given back.
  static size_t allocated_bytes();
  // What is enqueued and not done.
  static size_t num_waiting();
  static void Finish();

  // Runs `action` with the first of its calls failing, then with the second, and so on until it
  // ends without a failure; how many it has failed. `then` sees what became of each attempt.
  static uint64_t FailEachCall(const std::function<absl::Status()>& action,
                               const std::function<void(const absl::Status&)>& then);

  // For the fake's own parts. Counts a call, which fails if it is that one's turn.
  static absl::Status Call(const char* what);
  static absl::Status Enqueue(const char* what, Work work);
  // From here on, and until null, work is put there in place of being enqueued.
  static void Capture(std::vector<Work>* into);
};

}  // namespace crumb
