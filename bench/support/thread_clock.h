// SPDX-License-Identifier: Apache-2.0
//
// Processor time of the calling thread. What a measurement of one thread's arithmetic uses: on a
// loaded machine the turns of other processes are then not counted. Not for anything that waits.
#pragma once

#include <ctime>

namespace crumb::bench {

inline double ThreadSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

}  // namespace crumb::bench
