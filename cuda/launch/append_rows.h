// SPDX-License-Identifier: Apache-2.0
//
// The launch of append_rows. Plain C++ for callers that have no CUDA headers.
#pragma once

#include "crumb/cuda/append_rows.h"

namespace crumb::gpu {

// Enqueues; parameters are valid. Returns a cudaError_t.
int LaunchAppendRows(const AppendRowsParams& params, CUstream_st* stream);

}  // namespace crumb::gpu
