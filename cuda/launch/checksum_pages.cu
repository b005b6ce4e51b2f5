// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/kernels/checksum.cuh"

namespace crumb::gpu {

namespace {

template <int kCopies>
int LaunchWithCopies(const ChecksumPagesParams& params,
                     const ChecksumPlan& plan,
                     uint32_t num_multiprocessors,
                     CUstream_st* stream) {
  constexpr uint32_t kWarps = kChecksumThreads / 32;
  const auto kernel = ChecksumKernel<kCopies>;
  constexpr size_t kBytes = sizeof(ChecksumShared<kCopies>);
  const cudaError_t attribute = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  if (attribute != cudaSuccess) {
    return attribute;
  }
  const size_t num_sums = size_t{params.num_pages} * params.num_ranges;
  // Segments are added to it.
  const cudaError_t cleared =
      cudaMemsetAsync(params.checksums, 0, num_sums * sizeof(uint32_t), stream);
  if (cleared != cudaSuccess) {
    return cleared;
  }
  const size_t items = num_sums * plan.num_segments;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(
      static_cast<uint32_t>(std::min<size_t>(num_multiprocessors, (items + kWarps - 1) / kWarps)));
  config.blockDim = dim3(kChecksumThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, params, plan);
}

}  // namespace

int LaunchChecksumPages(const ChecksumPagesParams& params,
                        const ChecksumPlan& plan,
                        uint32_t num_multiprocessors,
                        size_t shared_memory_per_block,
                        CUstream_st* stream) {
  return shared_memory_per_block >= sizeof(ChecksumShared<32>)
             ? LaunchWithCopies<32>(params, plan, num_multiprocessors, stream)
             : LaunchWithCopies<8>(params, plan, num_multiprocessors, stream);
}

}  // namespace crumb::gpu
