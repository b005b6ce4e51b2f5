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

  // Calls store(k, i, word) with what the lane has of the row in operand A: a pair of elements 16 k
  // + 8 i + 2 t, in the order of K's tile, in fp16. Returns the sum of the row. Lane t has every
  // second of eight channels: the even ones or the odd ones.
  template <int kDim, typename Store>
  __device__ __forceinline__ float LoadQuery(int half, Store&& store) const {
    const int t = static_cast<int>(threadIdx.x) % 4;
    const uint32_t selector = t % 2 == 0 ? 0x5410 : 0x7632;
    const bool is_there = Has(half);
    const auto* from = static_cast<const std::byte*>(batch.queries) +
                       (is_there ? IndexOf(half) : 0) * kDim * 2 + t / 2 * 32;
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const uint4 eight = is_there ? *reinterpret_cast<const uint4*>(from + k / 2 * 64 + k % 2 * 16)
                                   : make_uint4(0, 0, 0, 0);
      const uint32_t pairs[2] = {__byte_perm(eight.x, eight.y, selector),
                                 __byte_perm(eight.z, eight.w, selector)};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const __half2 pair = batch.query_type == ElementType::kFp16
                                 ? AsHalves(pairs[i])
                                 : __float22half2_rn(__bfloat1622float2(AsPair(pairs[i])));
        sum += __low2float(pair) + __high2float(pair);
        store(k, i, AsWord(pair));
      }
    }
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    return sum + __shfl_xor_sync(kFullWarp, sum, 2);
  }
};

}  // namespace crumb::gpu
