// SPDX-License-Identifier: Apache-2.0
//
// The launch of append_rows. Plain C++ for callers that have no CUDA headers.
#pragma once

#include <cstdint>

#include "crumb/cuda/append_rows.h"

namespace crumb::gpu {

struct AppendRowsLaunch {
  AppendRowsParams params;
  // Tiles of 16 rows that a block has, one run. First come key_runs of K and queries, then
  // value_runs of V, then those of queries that have a rotation of their own.
  uint32_t tiles_of_run = 0;
  uint32_t key_runs = 0;
  uint32_t value_runs = 0;
};

// Enqueues; parameters are valid. `can_overlap`: the device has programmatic dependent launches
// (compute capability 9.0 on). Returns a cudaError_t.
int LaunchAppendRows(const AppendRowsParams& params,
                     uint32_t num_multiprocessors,
                     bool can_overlap,
                     CUstream_st* stream);

}  // namespace crumb::gpu
