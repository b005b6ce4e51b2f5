// SPDX-License-Identifier: Apache-2.0
#include "cuda/kernels/shared_prefix.cuh"
#include "cuda/launch/shared_prefix.h"

namespace crumb::gpu {
namespace {

template <int kHeadDim, int kRows, int kGroups>
int Launch(const SharedPrefixLaunch& launch, CUstream_st* stream) {
  const auto kernel = SharedPrefixKernel<kHeadDim, kRows, kGroups>;
  constexpr int kBytes = sizeof(PrefixShared<kHeadDim, kRows, kGroups>);
  static_assert(kBytes <= 227 * 1024, "more than a block may have");
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) {
    return error;
  }
  const uint32_t group = launch.batch.num_query_heads / launch.batch.num_kv_heads;
  const uint32_t row_blocks = (launch.batch.num_sequences * group + kRows - 1) / kRows;
  kernel<<<dim3(launch.num_splits, row_blocks, launch.batch.num_kv_heads),
           kGroups * kThreadsOfGroup, kBytes, stream>>>(launch);
  return cudaGetLastError();
}

}  // namespace

uint32_t SharedPrefixRows(uint32_t head_dim) {
  return head_dim == 64 || head_dim == 128 || head_dim == 256 ? 64 : 0;
}

int LaunchSharedPrefix(const SharedPrefixLaunch& launch, CUstream_st* stream) {
  switch (launch.batch.head_dim) {
    case 64:
      return Launch<64, 64, 3>(launch, stream);
    case 128:
      return Launch<128, 64, 3>(launch, stream);
    default:
      return Launch<256, 64, 2>(launch, stream);
  }
}

int LaunchSharedMerge(const SharedPrefixLaunch& launch, CUstream_st* stream) {
  constexpr uint32_t kRowsOfBlock = 4;
  const uint64_t rows = uint64_t{launch.batch.num_sequences} * launch.batch.num_query_heads;
  SharedMergeKernel<<<static_cast<uint32_t>((rows + kRowsOfBlock - 1) / kRowsOfBlock),
                      kRowsOfBlock * 32, 0, stream>>>(launch);
  return cudaGetLastError();
}

}  // namespace crumb::gpu
