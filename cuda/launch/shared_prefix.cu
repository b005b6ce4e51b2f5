// SPDX-License-Identifier: Apache-2.0
#include "cuda/kernels/shared_prefix.cuh"
#include "cuda/launch/shared_prefix.h"

namespace crumb::gpu {
namespace {

// Launches `kernel` so that it may start while the launch before it runs.
template <typename Kernel>
int LaunchEarly(Kernel kernel,
                dim3 grid,
                uint32_t threads,
                size_t shared_bytes,
                const SharedPrefixLaunch& launch,
                CUstream_st* stream) {
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, launch);
}

template <int kDim>
int Launch(const SharedPrefixLaunch& launch, CUstream_st* stream) {
  const auto kernel = SharedPrefixKernel<kDim>;
  constexpr int kBytes = sizeof(PrefixShared<kDim>);
  static_assert(kBytes <= 227 * 1024, "more than a block may have");
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) {
    return error;
  }
  const SplitDecodeParams& batch = launch.batch;
  const uint32_t rows = batch.num_sequences * (batch.num_query_heads / batch.num_kv_heads);
  const dim3 grid(launch.num_splits, (rows + kPrefixBlockRows - 1) / kPrefixBlockRows,
                  batch.num_kv_heads);
  return LaunchEarly(kernel, grid, kPrefixThreads, kBytes, launch, stream);
}

}  // namespace

int LaunchSharedPrefix(const SharedPrefixLaunch& launch, CUstream_st* stream) {
  switch (launch.batch.head_dim) {
    case 64:
      return Launch<64>(launch, stream);
    case 128:
      return Launch<128>(launch, stream);
    default:
      return Launch<256>(launch, stream);
  }
}

int LaunchSharedMerge(const SharedPrefixLaunch& launch, CUstream_st* stream) {
  constexpr uint32_t kRowsOfBlock = 4;
  const uint64_t rows = uint64_t{launch.batch.num_sequences} * launch.batch.num_query_heads;
  const dim3 grid(static_cast<uint32_t>((rows + kRowsOfBlock - 1) / kRowsOfBlock));
  return LaunchEarly(SharedMergeKernel, grid, kRowsOfBlock * 32, 0, launch, stream);
}

}  // namespace crumb::gpu
