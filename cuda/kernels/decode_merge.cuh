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

// The warps' results for one pair; `num_warps` rows of heads. Rows are apart by eight floats more
// than they have, so that the lanes of a warp write to banks of their own.
template <int kHeadDim, int kTiles>
struct MergeStorage {
  static constexpr int kHeads = kTiles * kHeadsOfTile;
  static constexpr int kStride = kHeadDim + 8;

  float* outputs;  // [num_warps, kHeads, kStride]
  float2* sums;    // [num_warps, kHeads]: (maximum, sum)

  static constexpr size_t Bytes(int num_warps) {
    return static_cast<size_t>(num_warps) * kHeads * (kStride * sizeof(float) + sizeof(float2));
  }
  __device__ MergeStorage(std::byte* shared, int num_warps)
      : outputs(reinterpret_cast<float*>(shared)),
        sums(reinterpret_cast<float2*>(outputs + num_warps * kHeads * kStride)) {}
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
      storage.sums[row] = make_float2(state.max[n], state.sum[n]);
    }
    float* outputs = storage.outputs + row * Storage::kStride;
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i) {
      outputs[i * 8 + g] = state.outputs[n][i] + state.offset[n];
    }
  }
}

// What the whole block has of a pair: to the outputs if it has all of it, else to its place in the
// workspace. `workspace_row` is that place's first row, ignored for the former.
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
    for (int w = 0; w < num_warps; ++w) {
      highest = fmaxf(highest, storage.sums[w * Storage::kHeads + head].x);
    }
    float4 out = make_float4(0, 0, 0, 0);
    float sum = 0;
    for (int w = 0; w < num_warps; ++w) {
      const int row = w * Storage::kHeads + head;
      const float2 part = storage.sums[row];
      const float share = ShareOf(part.x, highest);
      const float4 v =
          *reinterpret_cast<const float4*>(storage.outputs + row * Storage::kStride + channel);
      out.x = fmaf(share, v.x, out.x);
      out.y = fmaf(share, v.y, out.y);
      out.z = fmaf(share, v.z, out.z);
      out.w = fmaf(share, v.w, out.w);
      sum = fmaf(share, part.y, sum);
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

// By the block that comes last: the parts that blocks `first` to `last` left of one pair.
template <int kHeadDim>
__device__ __forceinline__ void MergeBlocks(const SplitDecodeParams& params,
                                            const DecodeWorkspace& workspace,
                                            uint32_t first,
                                            uint32_t last,
                                            int group,
                                            size_t query_row) {
  constexpr int kChunks = kHeadDim / 4;
  const auto row_of = [&](uint32_t block, int head) {
    return workspace.place(block, block == first ? 1 : 0) * workspace.group +
           static_cast<size_t>(head);
  };
  for (int i = static_cast<int>(threadIdx.x); i < group * kChunks;
       i += static_cast<int>(blockDim.x)) {
    const int head = i / kChunks;
    const int channel = i % kChunks * 4;
    float highest = -INFINITY;
    float4 out = make_float4(0, 0, 0, 0);
    float sum = 0;
#pragma unroll 8
    for (uint32_t block = first; block <= last; ++block) {
      const size_t row = row_of(block, head);
      const float2 part = __ldcg(SumOf(workspace, row));
      const float4 v = __ldcg(OutputOf<kHeadDim>(workspace, row, channel));
      const float raised = fmaxf(highest, part.x);
      const float decay = ShareOf(highest, raised);
      const float share = ShareOf(part.x, raised);
      highest = raised;
      out.x = fmaf(share, v.x, out.x * decay);
      out.y = fmaf(share, v.y, out.y * decay);
      out.z = fmaf(share, v.z, out.z * decay);
      out.w = fmaf(share, v.w, out.w * decay);
      sum = fmaf(share, part.y, sum * decay);
    }
    StoreResult(params, query_row + static_cast<size_t>(head), channel, out, highest, sum);
  }
}

}  // namespace crumb::gpu
