// SPDX-License-Identifier: Apache-2.0
//
// Launches of expansion, one form a head_dim, so that each is compiled by itself. Plain C++ for
// callers that have no CUDA headers.
#pragma once

#include <cstdint>

#include "crumb/cuda/expand_pages.h"

namespace crumb::gpu {

// Enqueues; parameters are valid. Returns a cudaError_t.
using LaunchExpandPages = int (*)(const ExpandPagesParams& params,
                                  bool has_warpgroups,
                                  uint32_t num_multiprocessors,
                                  CUstream_st* stream);

int LaunchExpandPages64(const ExpandPagesParams&,
                        bool has_warpgroups,
                        uint32_t num_multiprocessors,
                        CUstream_st*);
int LaunchExpandPages128(const ExpandPagesParams&,
                         bool has_warpgroups,
                         uint32_t num_multiprocessors,
                         CUstream_st*);
int LaunchExpandPages256(const ExpandPagesParams&,
                         bool has_warpgroups,
                         uint32_t num_multiprocessors,
                         CUstream_st*);

}  // namespace crumb::gpu
