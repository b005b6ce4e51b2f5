// SPDX-License-Identifier: Apache-2.0
//
// From the warps' states to one sum a block, through shared memory, and from sums to outputs. Sums
// are taken in the order of warps, so they are the same each time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "crumb/cuda/decode_params.h"
#include "cuda/kernels/decode_attend.cuh"
#include "cuda/launch/decode_workspace.h"

namespace crumb::gpu {

// The warps' results for one pair, each relative to its own maximum. Rows are apart by eight floats
// more than they have, so that the lanes of a warp write to banks of their own.
template <int kHeadDim, int kTiles>
struct MergeStorage {
  static constexpr int kHeads = kTiles * kHeadsOfTile;
  static constexpr int kStride = kHeadDim + 8;

  float* outputs;  // [num_warps, kHeads, kStride]
  float* sums;     // [num_warps, kHeads]
  float* maxima;   // [num_warps, kHeads]

  static constexpr size_t Bytes(int num_warps) {
    return static_cast<size_t>(num_warps) * kHeads * ((kStride + 2) * sizeof(float));
  }
  __device__ MergeStorage(std::byte* shared, int num_warps)
      : outputs(reinterpret_cast<float*>(shared)),
        sums(outputs + num_warps * kHeads * kStride),
        maxima(sums + num_warps * kHeads) {}
  __device__ __forceinline__ float4* Output4(uint32_t row, uint32_t head, uint32_t chunk) const {
    return reinterpret_cast<float4*>(outputs + (row * kHeads + head) * kStride + chunk * 4);
  }
};

// Below every maximum but that of nothing, -inf, whose share is then 0 without a question.
inline constexpr float kLowest = -1e30f;

__device__ __forceinline__ DecodeFindings* FindingsOf(const SplitDecodeParams& params) {
  return static_cast<DecodeFindings*>(params.workspace);
}

__device__ __forceinline__ void StoreOutput4(const SplitDecodeParams& params,
                                             size_t index,
                                             float4 value) {
  if (params.out_type == ElementType::kFloat32) {
    *reinterpret_cast<float4*>(static_cast<float*>(params.out) + index) = value;
    return;
  }
  uint2 packed;
  if (params.out_type == ElementType::kBf16) {
    const __nv_bfloat162 low = __floats2bfloat162_rn(value.x, value.y);
    const __nv_bfloat162 high = __floats2bfloat162_rn(value.z, value.w);
    packed = {reinterpret_cast<const uint32_t&>(low), reinterpret_cast<const uint32_t&>(high)};
  } else {
    const __half2 low = __floats2half2_rn(value.x, value.y);
    const __half2 high = __floats2half2_rn(value.z, value.w);
    packed = {reinterpret_cast<const uint32_t&>(low), reinterpret_cast<const uint32_t&>(high)};
  }
  *reinterpret_cast<uint2*>(static_cast<std::byte*>(params.out) + index * 2) = packed;
}

__device__ __forceinline__ void StoreResult(const SplitDecodeParams& params,
                                            size_t row,
                                            uint32_t channel,
                                            float4 sum_of_outputs,
                                            float highest,
                                            float sum) {
  const float inverse = sum > 0 ? Reciprocal(sum) : 0;
  StoreOutput4(params, row * params.head_dim + channel,
               make_float4(sum_of_outputs.x * inverse, sum_of_outputs.y * inverse,
                           sum_of_outputs.z * inverse, sum_of_outputs.w * inverse));
  if (params.lse != nullptr && channel == 0) {
    constexpr float kLn2 = 0.6931471805599453f;
    params.lse[row] = sum > 0 ? (highest + __log2f(sum)) * kLn2 : -INFINITY;
  }
}

// Leaves the warp's state in `storage`. By all threads; what the warps leave may be read after it.
template <int kHeadDim, int kTiles>
__device__ __forceinline__ void StoreState(AttentionState<kHeadDim, kTiles>& state,
                                           int warp,
                                           int lane,
                                           const MergeStorage<kHeadDim, kTiles>& storage) {
  using Storage = MergeStorage<kHeadDim, kTiles>;
  state.ReduceSums();
  const int g = lane / 4;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int row = warp * Storage::kHeads + n * kHeadsOfTile + lane % 4;
    if (g == 0) {
      storage.maxima[row] = state.max[n];
      storage.sums[row] = state.sum[n];
    }
    float* outputs = storage.outputs + row * Storage::kStride;
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i) {
      outputs[i * 8 + g] = state.outputs[n][i] + state.offset[n];
    }
  }
  __syncthreads();
}

// Up to sixteen rows that are merged have a lane each of half a warp, whose lanes have channels of
// one head: a lane finds out one row's share, and all take it from there.
struct HalfWarp {
  static constexpr uint32_t kLanes = 16;

  static __device__ __forceinline__ uint32_t lane() { return threadIdx.x % kLanes; }
  static __device__ __forceinline__ float Max(float x) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      x = fmaxf(x, __shfl_xor_sync(mask(), x, step, kLanes));
    }
    return x;
  }
  static __device__ __forceinline__ float Sum(float x) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      x += __shfl_xor_sync(mask(), x, step, kLanes);
    }
    return x;
  }
  static __device__ __forceinline__ float Of(float x, uint32_t lane) {
    return __shfl_sync(mask(), x, static_cast<int>(lane), kLanes);
  }

  static __device__ __forceinline__ uint32_t mask() {
    return 0xffffu << (threadIdx.x & kLanes);
  }
};

// What rows add up to, of four channels of one head: relative to 2^highest.
struct RowSum {
  float highest = kLowest;
  float sum = 0;
  float4 out = {0, 0, 0, 0};

  __device__ __forceinline__ void Add(float share, float4 x) {
    out.x = fmaf(share, x.x, out.x);
    out.y = fmaf(share, x.y, out.y);
    out.z = fmaf(share, x.z, out.z);
    out.w = fmaf(share, x.w, out.w);
  }
  // Starts with the rows whose maxima and sums the lanes of a half warp have. Returns the share of
  // the lane's own.
  __device__ __forceinline__ float Start(float its_max, float its_sum) {
    highest = fmaxf(HalfWarp::Max(its_max), kLowest);
    const float share = Exp2(its_max - highest);
    sum = HalfWarp::Sum(its_sum * share);
    return share;
  }
  __device__ __forceinline__ void Add(const RowSum& other) {
    const float raised = fmaxf(highest, other.highest);
    const float decay = Exp2(highest - raised);
    const float share = Exp2(other.highest - raised);
    highest = raised;
    sum = fmaf(sum, decay, other.sum * share);
    out = make_float4(out.x * decay, out.y * decay, out.z * decay, out.w * decay);
    Add(share, other.out);
  }
};

// The sum of the first `num_rows` rows of `storage`. By whole half warps.
template <int kHeadDim, int kTiles>
__device__ __forceinline__ RowSum MergeRows(const MergeStorage<kHeadDim, kTiles>& storage,
                                            uint32_t num_rows,
                                            uint32_t head,
                                            uint32_t chunk) {
  const uint32_t mine = HalfWarp::lane() * storage.kHeads + head;
  const bool has_row = HalfWarp::lane() < num_rows;
  RowSum total;
  const float share =
      total.Start(has_row ? storage.maxima[mine] : -INFINITY, has_row ? storage.sums[mine] : 0.0f);
  // Four at a time, so that their loads are on their way together. Rows that are not there have a
  // share of 0: no code of their own.
#pragma unroll 1
  for (uint32_t first = 0; first < num_rows; first += 4) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      total.Add(HalfWarp::Of(share, first + i),
                *storage.Output4(min(first + i, num_rows - 1), head, chunk));
    }
  }
  return total;
}

}  // namespace crumb::gpu
