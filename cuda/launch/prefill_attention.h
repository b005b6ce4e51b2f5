// SPDX-License-Identifier: Apache-2.0
//
// Launches of prefill attention, one form a head_dim, so that each is compiled by itself. Plain C++
// for callers that have no CUDA headers.
#pragma once

#include "crumb/cuda/prefill_attention.h"

namespace crumb::gpu {

// Enqueues; parameters are valid. Returns a cudaError_t.
using LaunchPrefillAttention = int (*)(const PrefillAttentionParams& params, CUstream_st* stream);

int LaunchPrefillAttention64(const PrefillAttentionParams& params, CUstream_st* stream);
int LaunchPrefillAttention128(const PrefillAttentionParams& params, CUstream_st* stream);
int LaunchPrefillAttention256(const PrefillAttentionParams& params, CUstream_st* stream);

// By warpgroup products, for devices of compute capability 9.
int LaunchPrefillWarpgroups64(const PrefillAttentionParams& params, CUstream_st* stream);
int LaunchPrefillWarpgroups128(const PrefillAttentionParams& params, CUstream_st* stream);

}  // namespace crumb::gpu
