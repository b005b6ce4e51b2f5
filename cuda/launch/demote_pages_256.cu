// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch/demote_pages.cuh"

namespace crumb::gpu {

int LaunchDemotePages256(const DemotePagesParams& params,
                         bool has_warpgroups,
                         uint32_t num_multiprocessors,
                         CUstream_st* stream) {
  return LaunchDemote<256>(params, has_warpgroups, num_multiprocessors, stream);
}

}  // namespace crumb::gpu
