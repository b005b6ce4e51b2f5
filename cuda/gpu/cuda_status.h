// SPDX-License-Identifier: Apache-2.0
//
// CUDA's errors as statuses.
#pragma once

#include <string_view>

#include "absl/status/status.h"

namespace crumb::gpu {

// OK for cudaSuccess; else a status that says what was tried, CUDA's name and words for the error:
// RESOURCE_EXHAUSTED out of memory, INVALID_ARGUMENT a stream or event of another device or of
// none, UNAVAILABLE no usable device or driver, INTERNAL others. Takes the error out of CUDA's
// memory of it, so that it is not found again by another call.
absl::Status CudaStatus(int error, std::string_view what);

}  // namespace crumb::gpu
