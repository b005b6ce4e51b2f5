// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/kernels/append_rows.cuh"
#include "cuda/launch/append_rows.h"

namespace crumb::gpu {
namespace {

template <int kDim, bool kFp16>
int Launch(const AppendRowsParams& params, CUstream_st* stream) {
  const uint64_t group = 1 + params.num_query_heads / params.num_kv_heads;
  const uint64_t tiles = (params.num_tokens * group + kAppendRows - 1) / kAppendRows;
  // One tile a block while few tokens want to be done soon; more, and blocks go round.
  constexpr uint64_t kMaxTiles = 32;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(
      params.num_kv_heads * AppendRoles(params.heads) * (kDim / (kAppendWarps * kAppendColumns)),
      static_cast<uint32_t>(std::min<uint64_t>(tiles, kMaxTiles)));
  config.blockDim = dim3(32 * kAppendWarps);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, AppendRowsKernel<kDim, kFp16>, params);
}

template <int kDim>
int LaunchOfType(const AppendRowsParams& params, CUstream_st* stream) {
  return params.type == ElementType::kFp16 ? Launch<kDim, true>(params, stream)
                                           : Launch<kDim, false>(params, stream);
}

}  // namespace

int LaunchAppendRows(const AppendRowsParams& params, CUstream_st* stream) {
  switch (params.heads.head_dim) {
    case 64:
      return LaunchOfType<64>(params, stream);
    case 128:
      return LaunchOfType<128>(params, stream);
    default:
      return LaunchOfType<256>(params, stream);
  }
}

}  // namespace crumb::gpu
