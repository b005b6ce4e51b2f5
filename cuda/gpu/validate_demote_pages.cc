// SPDX-License-Identifier: Apache-2.0
#include "absl/strings/str_cat.h"

#include "crumb/cuda/demote_pages.h"
#include "cuda/gpu/check_params.h"
#include "proto/base/status_macros.h"

namespace crumb {

bool HasDemotionKernels(const Profile& profile) {
  const Geometry& geometry = profile.geometry();
  for (uint32_t layer = 0; layer < geometry.num_layers; ++layer) {
    for (uint32_t head = 0; head < geometry.num_kv_heads; ++head) {
      if (!HasDemotionKernel(profile.head(layer, head))) {
        return false;
      }
    }
  }
  return true;
}

absl::Status ValidateDemotePages(const DemotePagesParams& params) {
  CRUMB_RETURN_IF_ERROR(gpu::CheckHeads(params.heads));
  if (params.heads.is_demoted_on_cpu) {
    return absl::UnimplementedError(
        "heads.is_demoted_on_cpu: the profile has key_ranges of its own, where the GPU cuts ranges "
        "as "
        "its kernels have it: demote these pages on the CPU by DemotePage");
  }
  CRUMB_RETURN_IF_ERROR(gpu::CheckRange("num_layers", params.first_layer, params.num_layers,
                                        params.heads.num_layers));
  CRUMB_RETURN_IF_ERROR(
      gpu::CheckRange("num_heads", params.first_head, params.num_heads, params.heads.num_kv_heads));
  // Units of work, K and V of a head block each, are counted in 31 bits.
  const uint32_t most = (1u << 30) / (params.num_layers * params.num_heads);
  CRUMB_RETURN_IF_ERROR(gpu::CheckRange("num_pages", 0, params.num_pages, most));
  CRUMB_RETURN_IF_ERROR(gpu::CheckRows("keys", params.keys));
  CRUMB_RETURN_IF_ERROR(gpu::CheckRows("values", params.values));
  CRUMB_RETURN_IF_ERROR(gpu::CheckBlocks("int2", params.int2.pages, params.int2.offset,
                                         params.int2.layer_stride, params.int2.head_stride));
  return gpu::CheckPointer("finding", params.finding, alignof(uint64_t));
}

}  // namespace crumb
