// SPDX-License-Identifier: Apache-2.0
//
// Device time of work that is captured in a CUDA graph and replayed. Errors end the program: a
// benchmark has nothing to save.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <functional>

namespace crumb::bench {

// Prints what failed and exits, unless it is cudaSuccess.
void CheckCuda(cudaError_t error, const char* what);

// Milliseconds of one replay of what `enqueue` puts on its stream: the median of `replays`, after
// two that are not counted.
double GraphMilliseconds(const std::function<void(cudaStream_t)>& enqueue, int replays = 25);

// Bytes read and written a second, in GB/s, of a copy within device memory that no cache holds, by
// the multiprocessors (the copy engines that a captured cudaMemcpy may use are slower).
double CopyBandwidth();

}  // namespace crumb::bench
