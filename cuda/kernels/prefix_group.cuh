// SPDX-License-Identifier: Apache-2.0
//
// A warpgroup's part of the attention to a shared prefix: its pages, one after the other, against
// the block's rows of queries. See shared_prefix.cuh for the whole.
//
// Everything is transposed: scores and outputs have tokens and channels as rows, and the queries as
// columns. So codes are the A operand, unpacked into registers by the one warp that needs them, and
// queries and probabilities lie in shared memory.
//
// K codes enter as fp16 subnormals (the bits as they are: c * 2^-24), exact as the products are. V
// is dequantised to fp16. Probabilities are fp16 relative to a maximum that only moves when it
// must: it starts 2^8 below the first page's largest, and a page that would pass 2^15 raises it.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/kernels/decode_attend.cuh"
#include "cuda/kernels/page_ring.cuh"
#include "cuda/kernels/ptx.cuh"
#include "cuda/kernels/wgmma.cuh"
#include "cuda/launch/shared_prefix.h"

namespace crumb::gpu {

inline constexpr int kThreadsOfGroup = 128;
inline constexpr float kHeadroom = 8;           // Of a new maximum, in base-2 exponents.
inline constexpr float kLargestWeight = 32768;  // 2^15: half of what fp16 can hold.
inline constexpr float kNoMaximum = -1e30f;

template <int kHeadDim, int kRows, int kGroups>
struct PrefixShared {
  static constexpr int kStages = 5;  // Of a warpgroup.
  // Cores of 8 k x 8 rows. Probabilities' cores lie 16 bytes further apart than they must, so that
  // the two halves of a stored matrix meet different banks.
  static constexpr uint32_t kQueryStride = kRows * 16;
  static constexpr uint32_t kWeightStride = kRows * 16 + 16;

  alignas(128) std::byte pages[kGroups][kStages][StageLayout<kHeadDim>::kBytes];
  alignas(128) std::byte queries[kHeadDim / 8 * kQueryStride];
  alignas(128) std::byte weights[kGroups][2][kPageTokens / 8 * kWeightStride];
  // For two neighbouring rows: sum of the query, minus the maximum; twice.
  float4 columns[kGroups][kRows / 2];
  int highest[kGroups][kRows];  // Of a page's scores, as ordered integers.
  float decay[kGroups][kRows];
  float sums[kGroups][kRows];
  StageState states[kGroups][kStages];
};

// An integer with the order of floats, and back.
__device__ __forceinline__ int Ordered(float x) {
  const int bits = __float_as_int(x);
  return bits >= 0 ? bits : bits ^ 0x7fffffff;
}
__device__ __forceinline__ float FromOrdered(int x) {
  return __int_as_float(x >= 0 ? x : x ^ 0x7fffffff);
}

// The same in all lanes, and the compiler knows it.
__device__ __forceinline__ int Uniform(int x) {
  return __shfl_sync(kFullWarp, x, 0);
}

// Among the threads of a warpgroup; whether any of them says so.
__device__ __forceinline__ bool GroupBarrierAny(int group, bool mine) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %2, 0;\nbarrier.cta.red.or.pred q, %1, 128, p;\n"
      "selp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(group + 1), "r"(mine ? 1u : 0u)
      : "memory");
  return __any_sync(kFullWarp, any != 0) != 0;  // So that the compiler sees it is uniform.
}

__device__ __forceinline__ void StoreMatrices(void* row, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(SharedAddress(row)),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}

// c += ones[16 x 16] x B[16 x 8]: sums over k.
__device__ __forceinline__ void MmaSumF16(float (&c)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%4,%4,%4},{%5,%6},"
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(0x3c003c00u), "r"(b0), "r"(b1));
}

// A warpgroup's part of a block: its pages, its state.
template <int kHeadDim, int kRows, int kGroups>
class PrefixGroup {
 public:
  using Shared = PrefixShared<kHeadDim, kRows, kGroups>;
  static constexpr int kSteps = kHeadDim / 32;   // Of K words.
  static constexpr int kBlocks = kHeadDim / 64;  // Of 64 channels.
  static constexpr int kColumnTiles = kRows / 8;
  static constexpr int kTilesOfWarp = kColumnTiles / 4;

  __device__ __forceinline__ PrefixGroup(Shared& shared, float score_scale)
      : shared_(shared),
        group_(Uniform(static_cast<int>(threadIdx.x) / kThreadsOfGroup)),
        warp_(Uniform(static_cast<int>(threadIdx.x) % kThreadsOfGroup / 32)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        score_scale_(score_scale) {
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
        outputs_[m][i] = 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kTilesOfWarp; ++i) {
      sums_[i][0] = sums_[i][1] = sums_[i][2] = sums_[i][3] = 0;
    }
  }

  // Products of a page's keys start. All operands are made first, and no product is under way then:
  // the compiler would make each wait for the one before. The other warpgroup's fill the time.
  __device__ __forceinline__ void StartScores(const std::byte* page) {
    uint32_t words[kSteps];
    LoadKeyWords(page, words);
    uint32_t a[kSteps * 2][4];
#pragma unroll
    for (int i = 0; i < kSteps * 2; ++i) {
      const uint32_t word = words[i / 2] >> (i % 2 * 8);
      a[i][0] = word & 0x00030003u;
      a[i][1] = word & 0x000c000cu;
      a[i][2] = word & 0x00300030u;
      a[i][3] = word & 0x00c000c0u;
    }
    WgmmaHold(scores_);
    WgmmaFence();
#pragma unroll
    for (int i = 0; i < kSteps * 2; ++i) {
      const std::byte* b = shared_.queries + i * 2 * Shared::kQueryStride;
      Wgmma<kRows, __half>::template Run<0>(scores_, a[i],
                                            WgmmaDescriptor(b, Shared::kQueryStride, 128), i > 0);
    }
    WgmmaCommit();
  }

  // Scores to weights, in shared memory for all of the warpgroup.
  __device__ __forceinline__ void MakeWeights(const std::byte* page, int buffer) {
    WgmmaWaitAll();
    WgmmaHold(scores_);
    const auto* meta =
        reinterpret_cast<const __half2*>(page + StageLayout<kHeadDim>::kInt2.key_meta_offset());
    const float2 even = __half22float2(meta[lane_ / 4 * 8 + warp_]);
    const float2 odd = __half22float2(meta[lane_ / 4 * 8 + 4 + warp_]);
    const float unit = score_scale_ * 16777216.0f;  // Codes came as c * 2^-24, odd rows' times 4.
    const float scale[2] = {even.x * unit, odd.x * unit * 0.25f};
    const float min[2] = {even.y * score_scale_, odd.y * score_scale_};
    if (GroupBarrierAny(group_, !StoreWeights(scale, min, buffer))) {
      RaiseMaxima(scale, min);
      StoreWeights(scale, min, buffer);
      GroupBarrierAny(group_, false);
    }
  }

  // Adds the page's values by their weights.
  __device__ __forceinline__ void AddOutputs(const std::byte* page, int buffer) {
    uint32_t scales[2][2][2];  // [kk][part][half]
    uint32_t mins[2][2][2];
    LoadValueMeta(page, scales, mins);
    const auto* codes = page + StageLayout<kHeadDim>::kInt2.value_codes_offset();
    uint32_t a[kBlocks][4][4];
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      const int tile = m * 4 + warp_;
      const uint2 words =
          *reinterpret_cast<const uint2*>(codes + (tile / 2 * 32 + lane_) * 16 + tile % 2 * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int kk = i / 2;
        const int part = i % 2;
        const uint32_t word = (kk == 0 ? words.x : words.y) >> (8 * part);
        Dequantise(word, scales[kk][part][0], mins[kk][part][0], a[m][i][0], a[m][i][1]);
        Dequantise(word >> 4, scales[kk][part][1], mins[kk][part][1], a[m][i][2], a[m][i][3]);
      }
    }
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      WgmmaHold(outputs_[m]);
    }
    WgmmaFence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        const std::byte* b = shared_.weights[group_][buffer] + i * 2 * Shared::kWeightStride;
        Wgmma<kRows, __half>::template Run<1>(outputs_[m], a[m][i],
                                              WgmmaDescriptor(b, Shared::kWeightStride, 128), 1);
      }
    }
    WgmmaCommit();
    AddSums(buffer);
    WgmmaWaitAll();
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      WgmmaHold(outputs_[m]);
    }
  }

  // Merges the other warpgroup's part and stores the block's.
  __device__ __forceinline__ void Finish(const SharedPrefixLaunch& launch, int first_row, int head);

 private:
  __device__ __forceinline__ void LoadKeyWords(const std::byte* page,
                                               uint32_t (&words)[kSteps]) const {
    if constexpr (kSteps == 2) {
      const uint2 two =
          *reinterpret_cast<const uint2*>(page + (warp_ / 2 * 32 + lane_) * 16 + warp_ % 2 * 8);
      words[0] = two.x;
      words[1] = two.y;
    } else {
#pragma unroll
      for (int i = 0; i < kSteps / 4; ++i) {
        const uint4 four =
            reinterpret_cast<const uint4*>(page)[(warp_ * (kSteps / 4) + i) * 32 + lane_];
        words[i * 4] = four.x;
        words[i * 4 + 1] = four.y;
        words[i * 4 + 2] = four.z;
        words[i * 4 + 3] = four.w;
      }
    }
  }

  // False: one would be too large for fp16.
  __device__ __forceinline__ bool StoreWeights(const float (&scale)[2],
                                               const float (&min)[2],
                                               int buffer) {
    // Where row l % 8 of a stored matrix goes: token 16 warp + 8 kk + row. See AddOutputs for the
    // order of tokens along k: lane t of V's words has tokens t, t + 4, ... of every eight.
    const int row = lane_ % 8;
    const int kk = lane_ / 8 % 2;
    const int core = (kk * 2 + warp_ % 2) * 2 + row / 4;
    const int k = row % 4 * 2 + warp_ / 2;
    std::byte* target =
        shared_.weights[group_][buffer] + core * Shared::kWeightStride + k * 16 + lane_ / 16 * 128;
    __half2 largest = __float2half2_rn(0);
#pragma unroll
    for (int pair = 0; pair < kColumnTiles / 2; ++pair) {
      uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int tile = pair * 2 + i;
        const float4 column = shared_.columns[group_][tile * 4 + lane_ % 4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* score = &scores_[tile * 4 + half * 2];
          const __half2 weight = __floats2half2_rn(
              Exp2(fmaf(score[0], scale[half], fmaf(min[half], column.x, column.y))),
              Exp2(fmaf(score[1], scale[half], fmaf(min[half], column.z, column.w))));
          largest = __hmax2(largest, weight);
          r[i * 2 + half] = reinterpret_cast<const uint32_t&>(weight);
        }
      }
      StoreMatrices(target + pair * 256, r);
    }
    AsyncProxyFence();
    return __low2float(largest) <= kLargestWeight && __high2float(largest) <= kLargestWeight;
  }

  // Maxima to kHeadroom below this page's largest where that is more; what there is follows.
  __device__ __forceinline__ void RaiseMaxima(const float (&scale)[2], const float (&min)[2]) {
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
      const float4 column = shared_.columns[group_][tile * 4 + lane_ % 4];
      const float* score = &scores_[tile * 4];
      const float left = MaxOfHead(fmaxf(fmaf(score[0], scale[0], min[0] * column.x),
                                         fmaf(score[2], scale[1], min[1] * column.x)));
      const float right = MaxOfHead(fmaxf(fmaf(score[1], scale[0], min[0] * column.z),
                                          fmaf(score[3], scale[1], min[1] * column.z)));
      if (lane_ < 4) {
        atomicMax(&shared_.highest[group_][tile * 8 + lane_ * 2], Ordered(left));
        atomicMax(&shared_.highest[group_][tile * 8 + lane_ * 2 + 1], Ordered(right));
      }
    }
    GroupBarrierAny(group_, false);
    const int thread = warp_ * 32 + lane_;
    if (thread < kRows) {
      float* minus_max = &shared_.columns[group_][thread / 2].y + thread % 2 * 2;
      const float wanted = FromOrdered(shared_.highest[group_][thread]) - kHeadroom;
      const float raised = fmaxf(-*minus_max, wanted);
      shared_.decay[group_][thread] = Exp2(-*minus_max - raised);
      shared_.highest[group_][thread] = Ordered(kNoMaximum);
      *minus_max = -raised;
    }
    GroupBarrierAny(group_, false);
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
      const float2 decay =
          *reinterpret_cast<const float2*>(&shared_.decay[group_][tile * 8 + lane_ % 4 * 2]);
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        outputs_[m][tile * 4] *= decay.x;
        outputs_[m][tile * 4 + 1] *= decay.y;
        outputs_[m][tile * 4 + 2] *= decay.x;
        outputs_[m][tile * 4 + 3] *= decay.y;
      }
    }
#pragma unroll
    for (int i = 0; i < kTilesOfWarp; ++i) {
      const float2 decay = *reinterpret_cast<const float2*>(
          &shared_.decay[group_][(warp_ * kTilesOfWarp + i) * 8 + lane_ % 4 * 2]);
      sums_[i][0] *= decay.x;
      sums_[i][1] *= decay.y;
    }
  }

  // Scales and minima of the tokens of a lane, as pairs along k.
  __device__ __forceinline__ void LoadValueMeta(const std::byte* page,
                                                uint32_t (&scales)[2][2][2],
                                                uint32_t (&mins)[2][2][2]) const {
    const std::byte* meta = page + StageLayout<kHeadDim>::kInt2.value_meta_offset();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int kk = 0; kk < 2; ++kk) {
        const uint4 four =
            *reinterpret_cast<const uint4*>(meta + (half * 4 + lane_ % 4) * 32 + kk * 16);
        scales[kk][0][half] = __byte_perm(four.x, four.z, 0x5410);
        mins[kk][0][half] = __byte_perm(four.x, four.z, 0x7632);
        scales[kk][1][half] = __byte_perm(four.y, four.w, 0x5410);
        mins[kk][1][half] = __byte_perm(four.y, four.w, 0x7632);
      }
    }
  }

  // Two rows of two tokens: bits 0-1 and 2-3 of bytes 0 and 2.
  __device__ __forceinline__ static void Dequantise(
      uint32_t word, uint32_t scales, uint32_t mins, uint32_t& even, uint32_t& odd) {
    const __half2 offset = __float2half2_rn(1024);
    const __half2& scale = reinterpret_cast<const __half2&>(scales);
    const __half2& min = reinterpret_cast<const __half2&>(mins);
    const uint32_t low = (word & 0x00030003u) | 0x64006400u;   // 1024 + c
    const uint32_t high = (word & 0x000c000cu) | 0x64006400u;  // 1024 + 4 c
    const __half2 first =
        __hfma2(__hsub2(reinterpret_cast<const __half2&>(low), offset), scale, min);
    const __half2 second = __hfma2(
        __hmul2(__hsub2(reinterpret_cast<const __half2&>(high), offset), __float2half2_rn(0.25f)),
        scale, min);
    even = reinterpret_cast<const uint32_t&>(first);
    odd = reinterpret_cast<const uint32_t&>(second);
  }

  // Sums of the weights as they were rounded, over tokens; a quarter of the rows each warp.
  __device__ __forceinline__ void AddSums(int buffer) {
#pragma unroll
    for (int i = 0; i < kTilesOfWarp; ++i) {
      const std::byte* matrix = shared_.weights[group_][buffer] +
                                lane_ / 8 * Shared::kWeightStride +
                                (warp_ * kTilesOfWarp + i) * 128 + lane_ % 8 * 16;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t b[4];
        LoadMatricesTransposed(b, matrix + half * 4 * Shared::kWeightStride);
        MmaSumF16(sums_[i], b[0], b[1]);
        MmaSumF16(sums_[i], b[2], b[3]);
      }
    }
  }

  Shared& shared_;
  int group_;
  int warp_;
  int lane_;
  float score_scale_;
  float scores_[kRows / 2];
  float outputs_[kBlocks][kRows / 2];
  float sums_[kTilesOfWarp][4];
};

template <int kHeadDim, int kRows, int kGroups>
__device__ __forceinline__ void PrefixGroup<kHeadDim, kRows, kGroups>::Finish(
    const SharedPrefixLaunch& launch, int first_row, int head) {
#pragma unroll
  for (int i = 0; i < kTilesOfWarp; ++i) {
    if (lane_ < 4) {
      float* sums = &shared_.sums[group_][(warp_ * kTilesOfWarp + i) * 8 + lane_ * 2];
      sums[0] = sums_[i][0];
      sums[1] = sums_[i][1];
    }
  }
  __syncthreads();  // Pages and weights are not needed any more: their memory is.
  const int thread = warp_ * 32 + lane_;
  const uint32_t group_size = launch.batch.num_query_heads / launch.batch.num_kv_heads;
  const uint32_t rows_of_head = launch.batch.num_sequences * group_size;
  const size_t num_rows = size_t{launch.batch.num_sequences} * launch.batch.num_query_heads;
  // This thread's columns, in neighbouring pairs: the block's maximum, and this warpgroup's share.
  const auto maximum = [&](int group, int column) {
    return -(&shared_.columns[group][column / 2].y)[column % 2 * 2];
  };
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    const int column = i / 2 * 8 + lane_ % 4 * 2 + i % 2;
    float highest = maximum(0, column);
#pragma unroll
    for (int g = 1; g < kGroups; ++g) {
      highest = fmaxf(highest, maximum(g, column));
    }
    const float share = Exp2(maximum(group_, column) - highest);
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      outputs_[m][i / 2 * 4 + i % 2] *= share;
      outputs_[m][i / 2 * 4 + i % 2 + 2] *= share;
    }
    if (lane_ / 4 == 0 && warp_ == 0) {
      shared_.sums[group_][column] *= share;
    }
  }
  // The others' outputs come to the first warpgroup, in memory that pages had.
  constexpr int kOutputs = kBlocks * kRows / 2;  // Of a thread.
  static_assert((kGroups - 1) * kOutputs * kThreadsOfGroup * sizeof(float) <=
                sizeof(shared_.pages));
  const auto exchange = [&](int group, int i) {
    return reinterpret_cast<float*>(shared_.pages[0][0]) +
           ((group - 1) * kOutputs + i) * kThreadsOfGroup + thread;
  };
  if (group_ != 0) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      *exchange(group_, i) = outputs_[i / (kRows / 2)][i % (kRows / 2)];
    }
  }
  __syncthreads();
  if (group_ != 0) {
    return;
  }
#pragma unroll
  for (int g = 1; g < kGroups; ++g) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      outputs_[i / (kRows / 2)][i % (kRows / 2)] += *exchange(g, i);
    }
  }
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    const int column = i / 2 * 8 + lane_ % 4 * 2 + i % 2;
    const auto row = static_cast<uint32_t>(first_row + column);
    if (row < rows_of_head) {
      const uint32_t sequence = row / group_size;
      const size_t place = blockIdx.x * num_rows + size_t{sequence} * launch.batch.num_query_heads +
                           static_cast<uint32_t>(head) * group_size + (row - sequence * group_size);
      float* out = launch.outputs + place * kHeadDim + warp_ * 16 + lane_ / 4;
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        out[m * 64] = outputs_[m][i / 2 * 4 + i % 2];
        out[m * 64 + 8] = outputs_[m][i / 2 * 4 + i % 2 + 2];
      }
      if (warp_ == 0 && lane_ / 4 == 0) {
        float highest = maximum(0, column);
        float sum = shared_.sums[0][column];
#pragma unroll
        for (int g = 1; g < kGroups; ++g) {
          highest = fmaxf(highest, maximum(g, column));
          sum += shared_.sums[g][column];
        }
        reinterpret_cast<float2*>(launch.sums)[place] = make_float2(highest, sum);
      }
    }
  }
}

}  // namespace crumb::gpu
