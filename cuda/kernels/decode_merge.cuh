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
#include "cuda/kernels/relaxed.cuh"
#include "cuda/kernels/work_share.cuh"
#include "cuda/launch/decode_workspace.h"

namespace crumb::gpu {

// Parts of a workspace; rows count heads of places.
__device__ __forceinline__ DecodeFindings* FindingsOf(const DecodeWorkspace& workspace) {
  return reinterpret_cast<DecodeFindings*>(workspace.base);
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
  const float inverse = sum > 0 ? Reciprocal(sum) : 0;
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

// What the block that merges a pair has of it, until it has the others' parts.
template <int kHeadDim, int kTiles>
struct OwnPart {
  static constexpr int kHeads = kTiles * kHeadsOfTile;
  static constexpr int kChunks = kHeadDim / 4;

  float4 outputs[kHeads * kChunks];
  float2 sums[kHeads];  // (maximum, sum)
};

// A pair (sequence, KV head), and the blocks that have a part of it.
struct PairTarget {
  size_t query_row = 0;
  int group = 0;  // Query heads.
  uint32_t first_block = 0;
  uint32_t last_block = 0;

  __device__ __forceinline__ bool is_whole() const { return first_block == last_block; }
  // A block's place in the workspace.
  __device__ __forceinline__ size_t PlaceOf(const DecodeWorkspace& workspace,
                                            uint32_t block) const {
    return workspace.place(block, block == first_block ? 1 : 0);
  }
};

// No word of a part is zero.
__device__ __forceinline__ float NotZero(float x) {
  return __float_as_uint(x) == 0 ? -0.0f : x;
}
__device__ __forceinline__ bool IsThere(float4 x, float2 y) {
  const uint32_t least = min(min(min(__float_as_uint(x.x), __float_as_uint(x.y)),
                                 min(__float_as_uint(x.z), __float_as_uint(x.w))),
                             min(__float_as_uint(y.x), __float_as_uint(y.y)));
  return least != 0;
}

// Calls function(row, is_in) for rows 0..count - 1, four at a time so that their loads are on their
// way together. What is beyond counts as the last row, with is_in false: no code of its own.
template <typename Function>
__device__ __forceinline__ void ForRows(int count, Function&& function) {
#pragma unroll 1
  for (int first = 0; first < count; first += 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      function(min(first + i, count - 1), first + i < count);
    }
  }
}

// Adds up what the warps left of a pair: to the outputs if the block has all of it, to `own` if it
// is the one to merge it (the last), else to its place in the workspace. By all threads.
template <int kHeadDim, int kTiles>
__device__ __forceinline__ void MergeWarps(const SplitDecodeParams& params,
                                           const MergeStorage<kHeadDim, kTiles>& storage,
                                           int num_warps,
                                           const DecodeWorkspace& workspace,
                                           const PairTarget& target,
                                           uint32_t block,
                                           OwnPart<kHeadDim, kTiles>& own) {
  using Storage = MergeStorage<kHeadDim, kTiles>;
  constexpr int kChunks = kHeadDim / 4;
  for (int i = static_cast<int>(threadIdx.x); i < target.group * kChunks;
       i += static_cast<int>(blockDim.x)) {
    const int head = i / kChunks;
    const int channel = i % kChunks * 4;
    float highest = -INFINITY;
    float4 out = make_float4(0, 0, 0, 0);
    float sum = 0;
    ForRows(num_warps, [&](int warp, bool) {
      highest = fmaxf(highest, storage.maxima[warp * Storage::kHeads + head]);
    });
    ForRows(num_warps, [&](int warp, bool is_in) {
      const int row = warp * Storage::kHeads + head;
      const float max = storage.maxima[row];
      const float share = ShareOf(is_in ? max : -INFINITY, highest);
      const float4 v =
          *reinterpret_cast<const float4*>(storage.outputs + row * Storage::kStride + channel);
      sum = fmaf(share, storage.sums[row], sum);
      out.x = fmaf(share, v.x, out.x);
      out.y = fmaf(share, v.y, out.y);
      out.z = fmaf(share, v.z, out.z);
      out.w = fmaf(share, v.w, out.w);
    });
    if (target.is_whole()) {
      StoreResult(params, target.query_row + static_cast<size_t>(head), channel, out, highest, sum);
    } else if (block == target.last_block) {
      own.outputs[i] = out;
      if (channel == 0) {
        own.sums[head] = make_float2(highest, sum);
      }
    } else {
      const size_t row =
          target.PlaceOf(workspace, block) * workspace.group + static_cast<size_t>(head);
      StoreRelaxed(OutputOf<kHeadDim>(workspace, row, channel),
                   make_float4(NotZero(out.x), NotZero(out.y), NotZero(out.z), NotZero(out.w)));
      if (channel == 0) {
        StoreRelaxed(SumOf(workspace, row), make_float2(NotZero(highest), NotZero(sum)));
      }
    }
  }
}

// How long a block waits for another's part. It comes within microseconds of this block's own; only
// if lengths change while a launch runs, or two launches share a workspace, does it never come.
inline constexpr uint64_t kPatienceNs = 10'000'000'000;

class Patience {
 public:
  __device__ __forceinline__ bool IsOver() {
    if (++tries_ % 1024 != 0) {
      return false;
    }
    const uint64_t now = DeviceNanoseconds();
    begin_ = begin_ == 0 ? now : begin_;
    return now - begin_ > kPatienceNs;
  }

 private:
  uint32_t tries_ = 0;
  uint64_t begin_ = 0;
};

// Some blocks' parts of four channels of one head.
template <int kHeadDim>
struct PartBatch {
  static constexpr uint32_t kSize = 8;  // Loads on their way together.
  float4 values[kSize];
  float2 sums[kSize];

  // Of blocks begin, begin + step, ... below the last. Waits until all have come. Short, for it
  // runs once a launch: every instruction of it is new to its multiprocessor.
  __device__ __forceinline__ void Take(const DecodeWorkspace& workspace,
                                       const PairTarget& target,
                                       uint32_t begin,
                                       uint32_t step,
                                       int head,
                                       int channel) {
    float4* outputs = OutputOf<kHeadDim>(workspace, 0, channel);
    const float2* all_sums = SumOf(workspace, 0);
    const uint32_t first_row = RowOf(workspace, target, begin, head);
    const uint32_t row = RowOf(workspace, target, begin + step, head) - 2 * workspace.group * step;
    Patience patience;
    bool is_there;
    do {
      is_there = true;
#pragma unroll
      for (uint32_t j = 0; j < kSize; ++j) {
        values[j] = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
        sums[j] = make_float2(-INFINITY, -0.0f);
        if (begin + j * step < target.last_block) {
          const uint32_t part = j == 0 ? first_row : row + 2 * workspace.group * step * j;
          values[j] = LoadRelaxed(outputs + part * (kHeadDim / 4));
          sums[j] = LoadRelaxed(all_sums + part);
        }
      }
#pragma unroll
      for (uint32_t j = 0; j < kSize; ++j) {
        is_there = is_there & IsThere(values[j], sums[j]);
      }
      if (!is_there && patience.IsOver()) [[unlikely]] {
        atomicOr(&FindingsOf(workspace)->problems, kPartMissing);
        break;
      }
    } while (!is_there);
#pragma unroll
    for (uint32_t j = 0; j < kSize; ++j) {
      if (begin + j * step < target.last_block) {
        const uint32_t part = j == 0 ? first_row : row + 2 * workspace.group * step * j;
        StoreRelaxed(outputs + part * (kHeadDim / 4), make_float4(0, 0, 0, 0));
      }
    }
  }

  // Of a workspace's rows there are less than 2^16.
  static __device__ __forceinline__ uint32_t RowOf(const DecodeWorkspace& workspace,
                                                   const PairTarget& target,
                                                   uint32_t block,
                                                   int head) {
    return static_cast<uint32_t>(target.PlaceOf(workspace, block)) * workspace.group +
           static_cast<uint32_t>(head);
  }
};

// By the last block that has a part of a pair: the others' parts and its own. Groups of threads
// take turns with the parts, each its own. By all threads. Blocks wait only for earlier ones, which
// the device starts first.
template <int kHeadDim, int kTiles>
__device__ __forceinline__ void MergeBlocks(const SplitDecodeParams& params,
                                            const MergeStorage<kHeadDim, kTiles>& storage,
                                            int num_warps,
                                            const DecodeWorkspace& workspace,
                                            const PairTarget& target,
                                            const OwnPart<kHeadDim, kTiles>& own) {
  using Storage = MergeStorage<kHeadDim, kTiles>;
  using Batch = PartBatch<kHeadDim>;
  constexpr int kChunks = kHeadDim / 4;
  const int items = target.group * kChunks;
  const int num_groups = min(num_warps, max(1, static_cast<int>(blockDim.x) / items));
  const auto step = static_cast<uint32_t>(num_groups);
  for (int i = static_cast<int>(threadIdx.x); i < items * num_groups;
       i += static_cast<int>(blockDim.x)) {
    const int turn = i / items;
    const int head = i % items / kChunks;
    const int channel = i % kChunks * 4;
    float highest = -INFINITY;
    float4 out = make_float4(0, 0, 0, 0);
    float sum = 0;
    for (uint32_t block = target.first_block + static_cast<uint32_t>(turn);
         block < target.last_block; block += Batch::kSize * step) {
      Batch batch;
      batch.Take(workspace, target, block, step, head, channel);
      float raised = highest;
#pragma unroll
      for (uint32_t j = 0; j < Batch::kSize; ++j) {
        raised = fmaxf(raised, batch.sums[j].x);
      }
      const float decay = ShareOf(highest, raised);
      highest = raised;
      out = make_float4(out.x * decay, out.y * decay, out.z * decay, out.w * decay);
      sum *= decay;
#pragma unroll
      for (uint32_t j = 0; j < Batch::kSize; ++j) {
        const float share = ShareOf(batch.sums[j].x, raised);
        out.x = fmaf(share, batch.values[j].x, out.x);
        out.y = fmaf(share, batch.values[j].y, out.y);
        out.z = fmaf(share, batch.values[j].z, out.z);
        out.w = fmaf(share, batch.values[j].w, out.w);
        sum = fmaf(share, batch.sums[j].y, sum);
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
    float highest = own.sums[head].x;
    ForRows(num_groups, [&](int turn, bool) {
      highest = fmaxf(highest, storage.maxima[turn * Storage::kHeads + head]);
    });
    const float own_share = ShareOf(own.sums[head].x, highest);
    float4 out = own.outputs[i];
    out = make_float4(out.x * own_share, out.y * own_share, out.z * own_share, out.w * own_share);
    float sum = own.sums[head].y * own_share;
    ForRows(num_groups, [&](int turn, bool is_in) {
      const int row = turn * Storage::kHeads + head;
      const float max = storage.maxima[row];
      const float share = ShareOf(is_in ? max : -INFINITY, highest);
      const float4 v =
          *reinterpret_cast<const float4*>(storage.outputs + row * Storage::kStride + channel);
      out.x = fmaf(share, v.x, out.x);
      out.y = fmaf(share, v.y, out.y);
      out.z = fmaf(share, v.z, out.z);
      out.w = fmaf(share, v.w, out.w);
      sum = fmaf(share, storage.sums[row], sum);
    });
    StoreResult(params, target.query_row + static_cast<size_t>(head), channel, out, highest, sum);
  }
  // All have read the sums.
  for (int i = static_cast<int>(threadIdx.x); i < items * num_groups;
       i += static_cast<int>(blockDim.x)) {
    if (i % kChunks == 0) {
      const int turn = i / items;
#pragma unroll 1
      for (uint32_t block = target.first_block + static_cast<uint32_t>(turn);
           block < target.last_block; block += step) {
        StoreRelaxed(SumOf(workspace, Batch::RowOf(workspace, target, block, i % items / kChunks)),
                     make_float2(0, 0));
      }
    }
  }
}

}  // namespace crumb::gpu
