// SPDX-License-Identifier: Apache-2.0
//
// A warpgroup's 64 rows of prefill attention on warpgroup products. The scores of a page are
// multiplied while the outputs of the page before are, and are made into probabilities while those
// go on (the order of FlashAttention-3, arXiv 2407.08608). See prefill_pages.cuh for the tiles.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "cuda/kernels/prefill_pages.cuh"
#include "cuda/kernels/prefill_tiles.cuh"
#include "cuda/kernels/wgmma.cuh"

namespace crumb::gpu {

inline constexpr float kPrefillHeadroom = 8;  // Of weights, in base-2 exponents.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <int kDim>
class PrefillGroup {
 public:
  static constexpr int kSteps = kDim / 16;
  static constexpr int kColumnTiles = kPageTokens / 8;

  // `first_row` of the KV head's rows is the warpgroup's first.
  __device__ __forceinline__ PrefillGroup(const PrefillAttentionParams& params,
                                          PrefillRing<kDim>& ring,
                                          uint32_t first_row)
      : params_(params),
        ring_(ring),
        lane_(static_cast<int>(threadIdx.x) % 32),
        group_(params.num_query_heads / params.num_kv_heads) {
    const uint32_t num_rows = params.num_queries * group_;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_[half] = first_row + threadIdx.x % kWarpgroupThreads / 32 * 16 + 8 * half + lane_ / 4;
      has_row_[half] = row_[half] < num_rows;
      const uint32_t query = has_row_[half] ? row_[half] / group_ : 0;
      limit_[half] = static_cast<int>(params.window_tokens - params.num_queries + query);
      base_[half] = 0;
      sum_[half] = offset_[half] = 0;
    }
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) {
      outputs_[i] = 0;
    }
  }

  __device__ __forceinline__ void Run(uint32_t num_tiles) {
    if (params_.history_pages > 0) {
      LoadQueriesForCodes();
      Attend<false>(0, params_.history_pages);
      // Outputs so far are in units of codes: those of the upper eight of 16 channels of four.
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) {
        outputs_[i] *= i / 4 % 2 == 0 ? kCodeUnit : kCodeUnit / 4;
      }
    }
    LoadQueries();
    Attend<true>(params_.history_pages, num_tiles);
    StoreOutputs();
  }

 private:
  // Row `half`'s place among rows of queries and outputs.
  __device__ __forceinline__ size_t RowIndex(int half) const {
    const uint32_t query = row_[half] / group_;
    return size_t{query} * params_.num_query_heads + blockIdx.y * group_ +
           (row_[half] - query * group_);
  }
  __device__ __forceinline__ const std::byte* QueryRow(int half) const {
    return static_cast<const std::byte*>(params_.queries) +
           (has_row_[half] ? RowIndex(half) : 0) * kDim * 2;
  }

  // Queries as operand A in the channels' own order.
  __device__ __forceinline__ void LoadQueries() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::byte* from = QueryRow(half) + lane_ % 4 * 4;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t loaded =
              has_row_[half] ? *reinterpret_cast<const uint32_t*>(from + k * 32 + i * 16) : 0;
          queries_[k][half + 2 * i] = QueryPair(loaded, params_.query_type);
        }
      }
    }
  }

  // Queries in the order and units of K's codes, and their sums, which minima are multiplied by.
  // Lane t has every second of eight channels: the even ones or the odd ones.
  __device__ __forceinline__ void LoadQueriesForCodes() {
    const int t = lane_ % 4;
    const uint32_t selector = t % 2 == 0 ? 0x5410 : 0x7632;
    const __nv_bfloat162 lift = __float2bfloat162_rn(t < 2 ? kLift : kLift / 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::byte* from = QueryRow(half) + t / 2 * 32;
      query_sum_[half] = 0;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const uint4 eight = has_row_[half]
                                ? *reinterpret_cast<const uint4*>(from + k / 2 * 64 + k % 2 * 16)
                                : make_uint4(0, 0, 0, 0);
        const uint32_t pairs[2] = {
            QueryPair(__byte_perm(eight.x, eight.y, selector), params_.query_type),
            QueryPair(__byte_perm(eight.z, eight.w, selector), params_.query_type)};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          query_sum_[half] +=
              __uint_as_float(pairs[i] << 16) + __uint_as_float(pairs[i] & 0xffff0000u);
          const __nv_bfloat162 lifted =
              __hmul2(reinterpret_cast<const __nv_bfloat162&>(pairs[i]), lift);
          queries_[k][half + 2 * i] = reinterpret_cast<const uint32_t&>(lifted);
        }
      }
      query_sum_[half] += __shfl_xor_sync(kFullWarp, query_sum_[half], 1);
      query_sum_[half] += __shfl_xor_sync(kFullWarp, query_sum_[half], 2);
    }
  }

  // Tiles [begin, end), all of history or all of windows; not none.
  template <bool kIsWindow>
  __device__ __forceinline__ void Attend(uint32_t begin, uint32_t end) {
    StartScores(Wait(begin));
    WgmmaWait<0>();
    WgmmaHold(scores_);
    Weigh<kIsWindow>(begin);
    Rescale();
    PackWeights();
#pragma unroll 1
    for (uint32_t tile = begin + 1; tile < end; ++tile) {
      StartScores(Wait(tile));
      StartOutputs<kIsWindow>(Stage(tile - 1));
      WgmmaWait<1>();
      WgmmaHold(scores_);
      Weigh<kIsWindow>(tile);
      WgmmaWait<0>();
      WgmmaHold(outputs_);
      Release(tile - 1);
      Rescale();
      PackWeights();
    }
    StartOutputs<kIsWindow>(Stage(end - 1));
    WgmmaWait<0>();
    WgmmaHold(outputs_);
    Release(end - 1);
  }

  __device__ __forceinline__ const PrefillStage<kDim>& Stage(uint32_t tile) const {
    return ring_.stages[tile % kPrefillStages];
  }
  __device__ __forceinline__ const PrefillStage<kDim>& Wait(uint32_t tile) {
    BarrierWait(&ring_.full[tile % kPrefillStages], tile / kPrefillStages % 2);
    return Stage(tile);
  }
  // By every thread: it costs nothing, and racecheck then sees that all reads come before what the
  // producer writes next.
  __device__ __forceinline__ void Release(uint32_t tile) {
    __syncwarp();
    BarrierArrive(&ring_.empty[tile % kPrefillStages]);
  }

  __device__ __forceinline__ void StartScores(const PrefillStage<kDim>& stage) {
    WgmmaHold(scores_);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const std::byte* b = stage.keys + k / 4 * kTileBlock + k % 4 * 32;
      Wgmma<64, __nv_bfloat16>::template Run<0>(scores_, queries_[k], SwizzledDescriptor(b), k > 0);
    }
    WgmmaCommit();
  }

  template <bool kIsWindow>
  __device__ __forceinline__ void StartOutputs(const PrefillStage<kDim>& stage) {
    WgmmaHold(outputs_);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (kIsWindow) {  // Rows are tokens.
        Wgmma<kDim, __nv_bfloat16>::template Run<1>(
            outputs_, weights_[k], SwizzledDescriptor(stage.values + k * 16 * kSwizzleRow), 1);
      } else {
        Wgmma<kDim, __nv_bfloat16>::template Run<0>(outputs_, weights_[k],
                                                    SwizzledDescriptor(stage.values + k * 32), 1);
      }
    }
    WgmmaCommit();
  }

  // Scores to weights times V's scales, and the sums of weights.
  template <bool kIsWindow>
  __device__ __forceinline__ void Weigh(uint32_t tile) {
    const PrefillStage<kDim>& stage = Stage(tile);
    if constexpr (kIsWindow) {
      SubtractFromWindow(static_cast<int>((tile - params_.history_pages) * kPageTokens));
    } else {
      SubtractFromCodes(stage);
    }
    KeepInRange(tile == 0);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const float4 value =
          kIsWindow ? make_float4(1, 1, 0, 0) : stage.value_meta[n * 4 + lane_ % 4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* score = &scores_[4 * n + 2 * half];
        const float first = Exp2(score[0]);
        const float second = Exp2(score[1]);
        sum_[half] += first + second;
        if constexpr (!kIsWindow) {
          offset_[half] = fmaf(second, value.w, fmaf(first, value.z, offset_[half]));
        }
        score[0] = first * value.x;
        score[1] = second * value.y;
      }
    }
  }

  // Products to base-2 exponents above base_.
  __device__ __forceinline__ void SubtractFromCodes(const PrefillStage<kDim>& stage) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const float4 key = stage.key_meta[n * 4 + lane_ % 4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* score = &scores_[4 * n + 2 * half];
        score[0] = fmaf(score[0], key.x, fmaf(key.z, query_sum_[half], -base_[half]));
        score[1] = fmaf(score[1], key.y, fmaf(key.w, query_sum_[half], -base_[half]));
      }
    }
  }
  __device__ __forceinline__ void SubtractFromWindow(int first_token) {
    const float scale = params_.scale * 1.4426950408889634f;
#pragma unroll
    for (int i = 0; i < kColumnTiles * 4; ++i) {
      const int half = i % 4 / 2;
      const int token = first_token + i / 4 * 8 + lane_ % 4 * 2 + i % 2;
      scores_[i] = token > limit_[half] ? -INFINITY : fmaf(scale, scores_[i], -base_[half]);
    }
  }

  // Moves a row's base to its largest score so far, if one is more than 2^kHeadroom above: so it is
  // for the first tile, and hardly ever later. A row sees a token of its first tile, so its base is
  // a number from then on.
  __device__ __forceinline__ void KeepInRange(bool is_first) {
    float highest[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      highest[half] = -INFINITY;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        highest[half] =
            fmaxf(highest[half], fmaxf(scores_[4 * n + 2 * half], scores_[4 * n + 2 * half + 1]));
      }
    }
    must_rescale_ =
        __any_sync(kFullWarp, is_first || fmaxf(highest[0], highest[1]) > kPrefillHeadroom) != 0;
    if (!must_rescale_) {
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      highest[half] = fmaxf(highest[half], __shfl_xor_sync(kFullWarp, highest[half], 1));
      highest[half] = fmaxf(highest[half], __shfl_xor_sync(kFullWarp, highest[half], 2));
      const float raise = is_first || highest[half] > kPrefillHeadroom ? highest[half] : 0;
      base_[half] += raise;
      decay_[half] = is_first ? 1 : Exp2(-raise);
      sum_[half] *= decay_[half];
      offset_[half] *= decay_[half];
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        scores_[4 * n + 2 * half] -= raise;
        scores_[4 * n + 2 * half + 1] -= raise;
      }
    }
  }

  __device__ __forceinline__ void Rescale() {
    if (must_rescale_) {
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) {
        outputs_[i] *= decay_[i % 4 / 2];
      }
    }
  }

  // As operand A of the products with V.
  __device__ __forceinline__ void PackWeights() {
#pragma unroll
    for (int i = 0; i < kColumnTiles * 2; ++i) {
      weights_[i / 4][i % 4] = PackBf16(scores_[2 * i], scores_[2 * i + 1]);
    }
  }

  __device__ __forceinline__ void StoreOutputs() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      StoreOutputRow<kDim>(params_, RowIndex(half), has_row_[half], base_[half], sum_[half],
                           offset_[half], lane_,
                           [&](int n, int i) { return outputs_[4 * n + 2 * half + i]; });
    }
  }

  const PrefillAttentionParams& params_;
  PrefillRing<kDim>& ring_;
  const int lane_;
  const uint32_t group_;
  // Of rows g and g + 8 of the warp's 16, which are this lane's.
  uint32_t row_[2];
  bool has_row_[2];
  int limit_[2];  // The last row of the windows that each sees.
  float query_sum_[2];
  float base_[2];    // What scores are relative to, in base-2 exponents.
  float sum_[2];     // Of this lane's weights.
  float offset_[2];  // Sum of weight * minimum of V over this lane's tokens.
  float decay_[2];   // What outputs have to be multiplied by, if must_rescale_.
  bool must_rescale_;
  uint32_t queries_[kSteps][4];
  uint32_t weights_[4][4];
  float scores_[kColumnTiles * 4];
  float outputs_[kDim / 2];
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace crumb::gpu
