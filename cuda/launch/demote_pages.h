// SPDX-License-Identifier: Apache-2.0
//
// Launches of demotion, one form a head_dim, so that each is compiled by itself. Plain C++ for
// callers that have no CUDA headers.
#pragma once

#include <cstdint>

#include "crumb/cuda/demote_pages.h"

namespace crumb::gpu {

// Enqueues; parameters are valid. Returns a cudaError_t.
using LaunchDemotePages = int (*)(const DemotePagesParams& params,
                                  bool has_warpgroups,
                                  uint32_t num_multiprocessors,
                                  CUstream_st* stream);

int LaunchDemotePages64(const DemotePagesParams&,
                        bool has_warpgroups,
                        uint32_t num_multiprocessors,
                        CUstream_st*);
int LaunchDemotePages128(const DemotePagesParams&,
                         bool has_warpgroups,
                         uint32_t num_multiprocessors,
                         CUstream_st*);
int LaunchDemotePages256(const DemotePagesParams&,
                         bool has_warpgroups,
                         uint32_t num_multiprocessors,
                         CUstream_st*);

}  // namespace crumb::gpu
