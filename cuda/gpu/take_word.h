// SPDX-License-Identifier: Apache-2.0
//
// Findings that kernels leave in one word of device memory.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

#include "crumb/cuda/device.h"

namespace crumb::gpu {

// Reads the word and zeroes it, in the stream's order; waits for the stream. Errors of CheckStream.
absl::StatusOr<uint64_t> TakeWord(uint64_t* word, GpuStream stream);

}  // namespace crumb::gpu
