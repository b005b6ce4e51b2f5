// SPDX-License-Identifier: Apache-2.0
//
// From the warps' states to outputs: within a block through shared memory, between blocks through
// the workspace. Sums are taken in the order of warps and of blocks, so they are the same each
// time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "crumb/cuda/decode_params.h"
#include "cuda/kernels/decode_attend.cuh"
#include "cuda/kernels/work_share.cuh"
#include "cuda/launch/decode_workspace.h"

namespace crumb::gpu {

// Parts of a workspace; rows count heads of places.
__device__ __forceinline__ DecodeFindings* FindingsOf(const DecodeWorkspace& workspace) {
  return reinterpret_cast<DecodeFindings*>(workspace.base);
}
__device__ __forceinline__ uint32_t* ArrivalsOf(const DecodeWorkspace& workspace) {
  return reinterpret_cast<uint32_t*>(workspace.base + DecodeWorkspace::arrivals_offset());
}
__device__ __forceinline__ float2* SumOf(const DecodeWorkspace& workspace, size_t row) {
  return reinterpret_cast<float2*>(workspace.base + DecodeWorkspace::sums_offset()) + row;
}
template <int kHeadDim>
__device__ __forceinline__ float4* OutputOf(const DecodeWorkspace& workspace,
                                            size_t row,
                                            int channel) {
  auto* outputs = reinterpret_cast<float*>(workspace.base + workspace.outputs_offset());
  return reinterpret_cast<float4*>(outputs + row * kHeadDim + channel);
}

// The warps' results for one pair, all relative to the block's maximum: what is left is to add
// them. Rows are apart by eight floats more than they have, so that the lanes of a warp write to
// banks of their own.
template <int kHeadDim, int kTiles>
struct MergeStorage {
  static constexpr int kHeads = kTiles * kHeadsOfTile;
  static constexpr int kStride = kHeadDim + 8;

  float* outputs;  // [num_warps, kHeads, kStride]
  float* sums;     // [num_warps, kHeads]
  float* maxima;   // [num_warps, kHeads], of each warp.

  static constexpr size_t Bytes(int num_warps) {
    return static_cast<size_t>(num_warps) * kHeads * ((kStride + 2) * sizeof(float));
  }
  __device__ MergeStorage(std::byte* shared, int num_warps)
      : outputs(reinterpret_cast<float*>(shared)),
        sums(outputs + num_warps * kHeads * kStride),
        maxima(sums + num_warps * kHeads) {}
};

__device__ __forceinline__ float ShareOf(float max, float highest) {
  return max == -INFINITY ? 0.0f : Exp2(max - highest);
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
                                            int channel,
                                            float4 sum_of_outputs,
                                            float highest,
                                            float sum) {
  const float inverse = sum > 0 ? 1 / sum : 0;
  StoreOutput4(params, row * params.head_dim + static_cast<size_t>(channel),
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
                                           int num_warps,
                                           int lane,
                                           const MergeStorage<kHeadDim, kTiles>& storage) {
  using Storage = MergeStorage<kHeadDim, kTiles>;
  state.ReduceSums();
  const int g = lane / 4;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    if (g == 0) {
      storage.maxima[warp * Storage::kHeads + n * kHeadsOfTile + lane] = state.max[n];
    }
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int head = n * kHeadsOfTile + lane % 4;
    float highest = -INFINITY;
    for (int w = g; w < num_warps; w += 8) {
      highest = fmaxf(highest, storage.maxima[w * Storage::kHeads + head]);
    }
    const float share = ShareOf(state.max[n], MaxOfHead(highest));
    const int row = warp * Storage::kHeads + head;
    if (g == 0) {
      storage.sums[row] = state.sum[n] * share;
    }
    float* outputs = storage.outputs + row * Storage::kStride;
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i) {
      outputs[i * 8 + g] = (state.outputs[n][i] + state.offset[n]) * share;
    }
  }
  __syncthreads();
}

// Adds up what the warps left of a pair: to the outputs if the block has all of it, else to its
// place in the workspace. By all threads.
template <int kHeadDim, int kTiles>
__device__ __forceinline__ void MergeWarps(const SplitDecodeParams& params,
                                           const MergeStorage<kHeadDim, kTiles>& storage,
                                           int num_warps,
                                           int group,
                                           size_t query_row,
                                           bool is_whole,
                                           const DecodeWorkspace& workspace,
                                           size_t place) {
  using Storage = MergeStorage<kHeadDim, kTiles>;
  constexpr int kChunks = kHeadDim / 4;
  for (int i = static_cast<int>(threadIdx.x); i < group * kChunks;
       i += static_cast<int>(blockDim.x)) {
    const int head = i / kChunks;
    const int channel = i % kChunks * 4;
    float highest = -INFINITY;
    float4 out = make_float4(0, 0, 0, 0);
    float sum = 0;
#pragma unroll 4
    for (int w = 0; w < num_warps; ++w) {
      const int row = w * Storage::kHeads + head;
      const float4 v =
          *reinterpret_cast<const float4*>(storage.outputs + row * Storage::kStride + channel);
      highest = fmaxf(highest, storage.maxima[row]);
      sum += storage.sums[row];
      out.x += v.x;
      out.y += v.y;
      out.z += v.z;
      out.w += v.w;
    }
    if (is_whole) {
      StoreResult(params, query_row + static_cast<size_t>(head), channel, out, highest, sum);
    } else {
      const size_t row = place * workspace.group + static_cast<size_t>(head);
      __stcg(OutputOf<kHeadDim>(workspace, row, channel), out);
      if (channel == 0) {
        __stcg(SumOf(workspace, row), make_float2(highest, sum));
      }
    }
  }
}

// By the block that comes last: the parts that blocks `first` to `last` left of one pair. Groups of
// threads take turns with the parts, each its own. By all threads.
template <int kHeadDim, int kTiles>
__device__ __forceinline__ void MergeBlocks(const SplitDecodeParams& params,
                                            const MergeStorage<kHeadDim, kTiles>& storage,
                                            int num_warps,
                                            const DecodeWorkspace& workspace,
                                            uint32_t first,
                                            uint32_t last,
                                            int group,
                                            size_t query_row) {
  using Storage = MergeStorage<kHeadDim, kTiles>;
  constexpr int kChunks = kHeadDim / 4;
  constexpr uint32_t kBatch = 8;  // Loads on their way together.
  const int items = group * kChunks;
  const int num_groups = min(num_warps, max(1, static_cast<int>(blockDim.x) / items));
  for (int i = static_cast<int>(threadIdx.x); i < items * num_groups;
       i += static_cast<int>(blockDim.x)) {
    const int turn = i / items;
    const int head = i % items / kChunks;
    const int channel = i % kChunks * 4;
    float highest = -INFINITY;
    float4 out = make_float4(0, 0, 0, 0);
    float sum = 0;
    for (uint32_t block = first + static_cast<uint32_t>(turn); block <= last;
         block += kBatch * static_cast<uint32_t>(num_groups)) {
      float2 parts[kBatch];
      float4 values[kBatch];
      float raised = highest;
#pragma unroll
      for (uint32_t j = 0; j < kBatch; ++j) {
        const uint32_t from = block + j * static_cast<uint32_t>(num_groups);
        parts[j] = make_float2(-INFINITY, 0);
        values[j] = make_float4(0, 0, 0, 0);
        if (from <= last) {
          const size_t row = workspace.place(from, from == first ? 1 : 0) * workspace.group +
                             static_cast<size_t>(head);
          parts[j] = __ldcg(SumOf(workspace, row));
          values[j] = __ldcg(OutputOf<kHeadDim>(workspace, row, channel));
        }
      }
#pragma unroll
      for (uint32_t j = 0; j < kBatch; ++j) {
        raised = fmaxf(raised, parts[j].x);
      }
      const float decay = ShareOf(highest, raised);
      highest = raised;
      out = make_float4(out.x * decay, out.y * decay, out.z * decay, out.w * decay);
      sum *= decay;
#pragma unroll
      for (uint32_t j = 0; j < kBatch; ++j) {
        const float share = ShareOf(parts[j].x, raised);
        out.x = fmaf(share, values[j].x, out.x);
        out.y = fmaf(share, values[j].y, out.y);
        out.z = fmaf(share, values[j].z, out.z);
        out.w = fmaf(share, values[j].w, out.w);
        sum = fmaf(share, parts[j].y, sum);
      }
    }
    const int row = turn * Storage::kHeads + head;
    *reinterpret_cast<float4*>(storage.outputs + row * Storage::kStride + channel) = out;
    if (channel == 0) {
      storage.maxima[row] = highest;
      storage.sums[row] = sum;
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < items; i += static_cast<int>(blockDim.x)) {
    const int head = i / kChunks;
    const int channel = i % kChunks * 4;
    float highest = -INFINITY;
    for (int turn = 0; turn < num_groups; ++turn) {
      highest = fmaxf(highest, storage.maxima[turn * Storage::kHeads + head]);
    }
    float4 out = make_float4(0, 0, 0, 0);
    float sum = 0;
    for (int turn = 0; turn < num_groups; ++turn) {
      const int row = turn * Storage::kHeads + head;
      const float share = ShareOf(storage.maxima[row], highest);
      const float4 v =
          *reinterpret_cast<const float4*>(storage.outputs + row * Storage::kStride + channel);
      out.x = fmaf(share, v.x, out.x);
      out.y = fmaf(share, v.y, out.y);
      out.z = fmaf(share, v.z, out.z);
      out.w = fmaf(share, v.w, out.w);
      sum = fmaf(share, storage.sums[row], sum);
    }
    StoreResult(params, query_row + static_cast<size_t>(head), channel, out, highest, sum);
  }
}

}  // namespace crumb::gpu
