// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch/expand_pages.cuh"

namespace crumb::gpu {

int LaunchExpandPages128(const ExpandPagesParams& params,
                         bool has_warpgroups,
                         uint32_t num_multiprocessors,
                         CUstream_st* stream) {
  return LaunchExpand<128>(params, has_warpgroups, num_multiprocessors, stream);
}

}  // namespace crumb::gpu
