// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of a checksum's launch that does not depend on the bytes. Host only, no CUDA.
#pragma once

#include "cuda/launch/checksum_pages.h"

namespace crumb::gpu {

// For valid parameters; enough segments for `num_warps` warps to have work.
ChecksumPlan PlanChecksum(const ChecksumPagesParams& params, uint32_t num_warps);

}  // namespace crumb::gpu
