// SPDX-License-Identifier: Apache-2.0
//
// The rows of queries, sequences x heads of a KV head's group, that a warpgroup multiplies with the
// tiles of a shared prefix.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "crumb/cuda/decode_params.h"
#include "cuda/kernels/code_tiles.cuh"
#include "cuda/kernels/packed.cuh"
#include "cuda/kernels/ptx.cuh"

namespace crumb::gpu {

// A warpgroup's 64 rows of KV head blockIdx.z, of which a lane (g, t) has two with three others: g
// and g + 8 of its warp's 16, here called half 0 and 1.
struct PrefixRows {
  const SplitDecodeParams& batch;
  uint32_t first;     // Of the KV head's rows.
  uint32_t num_rows;  // Of the KV head; behind them are zeros.

  __device__ __forceinline__ static uint32_t InGroup(int half) {
    return threadIdx.x % kWarpgroupThreads / 32 * 16 + 8 * half + threadIdx.x % 32 / 4;
  }
  __device__ __forceinline__ bool Has(int half) const { return first + InGroup(half) < num_rows; }
  // The row's place among rows of queries and outputs.
  __device__ __forceinline__ size_t IndexOf(int half) const {
    const uint32_t row = first + InGroup(half);
    const uint32_t group = batch.num_query_heads / batch.num_kv_heads;
    const uint32_t sequence = row / group;
    return size_t{sequence} * batch.num_query_heads + blockIdx.z * group + (row - sequence * group);
  }

  // The power of two that brings the row's largest element to between 2^15 and 2^16: whatever bf16
  // holds is then within fp16's range, and what is lost of small elements is nothing beside it.
  template <int kDim>
  __device__ __forceinline__ float LiftOf(int half) const {
    uint32_t largest = 0;
    const std::byte* from = RowOfLane<kDim>(half);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const uint4 eight = EightOf(from, half, k);
      // Magnitudes are in the order of their bits.
      largest = __vmaxu2(__vmaxu2(largest, eight.x & kMagnitudes), eight.y & kMagnitudes);
      largest = __vmaxu2(__vmaxu2(largest, eight.z & kMagnitudes), eight.w & kMagnitudes);
    }
    largest = __vmaxu2(largest, __shfl_xor_sync(kFullWarp, largest, 2));  // The row's other half.
    const float2 two = ToFloats(largest);
    // Below 2^-111 all are as good as zero.
    const uint32_t exponent = max(__float_as_uint(fmaxf(two.x, two.y)) >> 23, 16u);
    return __uint_as_float((2 * 127 + 15 - exponent) << 23);
  }

  // Calls store(k, i, word) with what the lane has of the row in operand A: a pair of elements 16 k
  // + 8 i + 2 t, in the order of K's tile, times `lift` in fp16. Returns the sum of the row so.
  // Lane t has every second of eight channels: the even ones or the odd ones.
  template <int kDim, typename Store>
  __device__ __forceinline__ float LoadQuery(int half, float lift, Store&& store) const {
    const uint32_t selector = threadIdx.x % 2 == 0 ? 0x5410 : 0x7632;
    const std::byte* from = RowOfLane<kDim>(half);
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const uint4 eight = EightOf(from, half, k);
      const uint32_t pairs[2] = {__byte_perm(eight.x, eight.y, selector),
                                 __byte_perm(eight.z, eight.w, selector)};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 exact = ToFloats(pairs[i]);
        const __half2 pair = __floats2half2_rn(exact.x * lift, exact.y * lift);
        sum += __low2float(pair) + __high2float(pair);
        store(k, i, AsWord(pair));
      }
    }
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    return sum + __shfl_xor_sync(kFullWarp, sum, 2);
  }

 private:
  static constexpr uint32_t kMagnitudes = 0x7fff7fffu;

  // Lanes t = 0 and 1 read the first 16 of every 32 channels, the others the second.
  template <int kDim>
  __device__ __forceinline__ const std::byte* RowOfLane(int half) const {
    return static_cast<const std::byte*>(batch.queries) +
           (Has(half) ? IndexOf(half) : 0) * kDim * 2 + threadIdx.x % 4 / 2 * 32;
  }
  __device__ __forceinline__ uint4 EightOf(const std::byte* from, int half, int k) const {
    return Has(half) ? *reinterpret_cast<const uint4*>(from + k / 2 * 64 + k % 2 * 16)
                     : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ float2 ToFloats(uint32_t pair) const {
    return batch.query_type == ElementType::kFp16 ? __half22float2(AsHalves(pair))
                                                  : __bfloat1622float2(AsPair(pair));
  }
};

}  // namespace crumb::gpu
