// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include "bench/gpu/gpu_timer.h"

namespace crumb::bench {
namespace {

// Each thread four vectors of 16 bytes, apart by the block's width.
__global__ void CopyVectors(uint4* target, const uint4* source) {
  const size_t first = size_t{blockIdx.x} * blockDim.x * 4 + threadIdx.x;
  uint4 values[4];
#pragma unroll
  for (size_t i = 0; i < 4; ++i) {
    values[i] = __ldcs(&source[first + i * blockDim.x]);
  }
#pragma unroll
  for (size_t i = 0; i < 4; ++i) {
    __stcs(&target[first + i * blockDim.x], values[i]);
  }
}

}  // namespace

double CopyBandwidth() {
  constexpr size_t kBytes = size_t{4} << 30;
  constexpr uint32_t kThreads = 512;
  constexpr uint32_t kBlocks = kBytes / sizeof(uint4) / 4 / kThreads;
  uint4* source = nullptr;
  uint4* target = nullptr;
  CheckCuda(cudaMalloc(&source, kBytes), "allocating");
  CheckCuda(cudaMalloc(&target, kBytes), "allocating");
  CheckCuda(cudaMemset(source, 1, kBytes), "filling");
  const double milliseconds = GraphMilliseconds(
      [&](cudaStream_t stream) { CopyVectors<<<kBlocks, kThreads, 0, stream>>>(target, source); });
  cudaFree(source);
  cudaFree(target);
  return 2 * static_cast<double>(kBytes) / milliseconds / 1e6;
}

}  // namespace crumb::bench
