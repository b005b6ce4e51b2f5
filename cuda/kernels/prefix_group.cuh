// SPDX-License-Identifier: Apache-2.0
//
// A warpgroup's 64 rows of queries against the tiles of a shared prefix. While it makes a page's
// scores into weights, the tensor cores have the scores of the next page and the outputs of the
// page before to multiply (after FlashAttention-3, arXiv 2407.08608).
//
// Weights are fp16, relative to a base that moves only when it must: to 2^8 below the largest where
// a weight would pass 2^15.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/kernels/packed.cuh"
#include "cuda/kernels/prefix_rows.cuh"
#include "cuda/kernels/prefix_tiles.cuh"
#include "cuda/kernels/wgmma.cuh"
#include "cuda/launch/shared_prefix.h"

namespace crumb::gpu {

inline constexpr float kPrefixHeadroom = 8;          // Of a new base, in base-2 exponents.
inline constexpr int kHighestExponent = 0x41700000;  // 15 in f32; fp16 holds up to 2^16.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <int kDim>
class PrefixGroup {
 public:
  using Shared = PrefixShared<kDim>;
  using Place = RingPlace<Shared::kStages>;
  static constexpr int kSteps = kDim / 16;  // Of scores.
  static constexpr int kColumnTiles = kPageTokens / 8;
  static constexpr int kScores = kColumnTiles * 4;  // Of a thread.
  // With head_dim 256, outputs leave no registers for queries and two pages' scores.
  static constexpr bool kIsWide = kDim == 256;
  static constexpr int kLastColumns = kIsWide ? 128 : kDim;  // Of outputs, beside the sums.

  // The warpgroup's rows are those from `first_row` on of the KV head's `num_rows`, and zeros
  // behind them. It takes every `step`th tile from `first` on.
  __device__ __forceinline__ PrefixGroup(const SharedPrefixLaunch& launch,
                                         Shared& shared,
                                         uint32_t index,
                                         uint32_t first_row,
                                         uint32_t num_rows,
                                         uint32_t first,
                                         uint32_t step)
      : launch_(launch),
        shared_(shared),
        index_(index),
        rows_{launch.batch, first_row, num_rows},
        lane_(static_cast<int>(threadIdx.x) % 32),
        step_(step) {
    current_.Advance(first);
  }

  __device__ __forceinline__ void LoadQueries() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float lift = rows_.LiftOf<kDim>(half);
      unit_[half] = launch_.batch.scale * 1.4426950408889634f / lift;
      const float sum = rows_.LoadQuery<kDim>(half, lift, [&](int k, int i, uint32_t word) {
        if constexpr (kIsWide) {
          const uint32_t at = PrefixRows::InGroup(half);
          *reinterpret_cast<uint32_t*>(Queries() + k / 4 * kTileBlock + at * kSwizzleRow +
                                       ((k % 4 * 2 + i) ^ (at % 8)) * 16 + lane_ % 4 * 4) = word;
        } else {
          queries_[k][half + 2 * i] = word;
        }
      });
      query_sum_[half] = sum * unit_[half];
    }
    if constexpr (kIsWide) {
      AsyncProxyFence();
      asm volatile("bar.sync %0, 128;" ::"r"(index_ + 1) : "memory");
    }
  }

  __device__ __forceinline__ void Run(uint32_t num_tiles) {
    if (num_tiles == 0) {
      return;
    }
    AttendFirst(num_tiles > 1);
#pragma unroll 1
    for (; num_tiles > 1; --num_tiles) {
      if constexpr (kIsWide) {
        StepInPlace();
      } else {
        Step(num_tiles > 2);
      }
    }
    StartOutputs(Stage(current_));
    WgmmaWait<0>();
    HoldOutputs();
    WgmmaHold(scores_);
    Release(current_);
  }

  // As part `part` of the prefix.
  __device__ __forceinline__ void Store(uint32_t part) {
    const SplitDecodeParams& batch = launch_.batch;
    const int t = lane_ % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* sums = &outputs_[kLastColumns / 2 + 2 * half];
      const float sum = __shfl_sync(kFullWarp, sums[0], lane_ - t);
      const float offset = __shfl_sync(kFullWarp, sums[1], lane_ - t);
      if (!rows_.Has(half)) {
        continue;
      }
      const size_t place =
          size_t{part} * batch.num_sequences * batch.num_query_heads + rows_.IndexOf(half);
      float* out = launch_.outputs + place * kDim + 2 * t;
      if constexpr (kIsWide) {
        StoreColumns<128>(first_outputs_, half, offset, out);
      }
      StoreColumns<kLastColumns>(outputs_, half, offset, out + kDim - kLastColumns);
      if (t == 0) {
        reinterpret_cast<float2*>(launch_.sums)[place] =
            make_float2(base_[half], has_added_ ? sum : 0);
      }
    }
  }

 private:
  // This warpgroup's, where they are not in registers.
  __device__ __forceinline__ std::byte* Queries() const {
    return shared_.queries + index_ * (kPrefixGroupRows * kDim * 2);
  }

  __device__ __forceinline__ const PrefixStage<kDim>& Stage(Place place) const {
    return shared_.stages[place.stage];
  }
  __device__ __forceinline__ const PrefixStage<kDim>& Wait(Place place) {
    BarrierWait(&shared_.full[place.stage], place.parity);
    return Stage(place);
  }
  // By every thread: racecheck then sees that all reads come before what the producer writes next.
  __device__ __forceinline__ void Release(Place place) {
    __syncwarp();
    BarrierArrive(&shared_.empty[place.stage]);
  }

  // Makes the weights of the current tile, of which nothing is started.
  __device__ __forceinline__ void AttendFirst(bool has_next) {
    StartScores(Wait(current_));
    WgmmaWait<0>();
    WgmmaHold(scores_);
    Offsets offsets;
    LoadOffsets(offsets);
    float weights[kScores];
    ToExponents(offsets, weights);
    if constexpr (!kIsWide) {
      StartScores(WaitForNext(has_next));
    }
    ToWeights(weights);
    PackWeights(weights);
  }

  // From the current tile, whose weights are made, to the next, whose scores are under way: adds
  // the outputs of the one and makes the weights of the other. Scores leave their registers before
  // those of the tile after are started.
  __device__ __forceinline__ void Step(bool has_next) {
    const Place previous = current_;
    current_.Advance(step_);
    const PrefixStage<kDim>& next = WaitForNext(has_next);
    Offsets offsets;
    LoadOffsets(offsets);
    WgmmaWait<0>();
    WgmmaHold(scores_);
    float weights[kScores];
    ToExponents(offsets, weights);
    StartOutputs(Stage(previous));
    StartScores(next);
    ToWeights(weights);
    WgmmaWait<1>();
    HoldOutputs();
    Release(previous);
    Rescale();
    PackWeights(weights);
  }
  // The same with scores that are started here, since there are registers for one tile's alone.
  __device__ __forceinline__ void StepInPlace() {
    const Place previous = current_;
    current_.Advance(step_);
    StartScores(Wait(current_));
    StartOutputs(Stage(previous));
    Offsets offsets;
    LoadOffsets(offsets);
    WgmmaWait<1>();
    WgmmaHold(scores_);
    float weights[kScores];
    ToExponents(offsets, weights);
    ToWeights(weights);
    WgmmaWait<0>();
    HoldOutputs();
    Release(previous);
    Rescale();
    PackWeights(weights);
  }

  // Behind the last tile, that one once more: it is cheaper than another form of the loop.
  __device__ __forceinline__ const PrefixStage<kDim>& WaitForNext(bool has_next) {
    Place next = current_;
    if (has_next) {
      next.Advance(step_);
    }
    return Wait(next);
  }

  __device__ __forceinline__ void StartScores(const PrefixStage<kDim>& stage) {
    WgmmaFence();
    const uint64_t keys = SwizzledDescriptor(stage.keys);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      constexpr uint64_t kBlock = kTileBlock / 16;
      const uint64_t moved = k / 4 * kBlock + k % 4 * 2;
      if constexpr (kIsWide) {
        WgmmaShared64<__half>(scores_, SwizzledDescriptor(Queries()) + moved, keys + moved, k > 0);
      } else {
        Wgmma<64, __half>::template Run<0>(scores_, queries_[k], keys + moved, k > 0);
      }
    }
    WgmmaCommit();
  }

  __device__ __forceinline__ void StartOutputs(const PrefixStage<kDim>& stage) {
    const bool accumulate = has_added_;
    WgmmaFence();
    const uint64_t values = SwizzledDescriptor(stage.values);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (kIsWide) {
        Wgmma<128, __half>::template Run<0>(first_outputs_, weights_[k], values + k * 2,
                                            accumulate || k > 0);
      }
      Wgmma<kLastColumns + kPrefixSumRows, __half>::template Run<0>(
          outputs_, weights_[k], values + (kDim - kLastColumns) * (kSwizzleRow / 16) + k * 2,
          accumulate || k > 0);
    }
    has_added_ = true;
    WgmmaCommit();
  }
  __device__ __forceinline__ void HoldOutputs() {
    WgmmaHold(outputs_);
    if constexpr (kIsWide) {
      WgmmaHold(first_outputs_);
    }
  }

  // What the current tile's keys have besides their elements; of this lane's columns.
  using Offsets = float[kColumnTiles][2];
  __device__ __forceinline__ void LoadOffsets(Offsets& offsets) const {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const float2 two =
          reinterpret_cast<const float2*>(Stage(current_).key_offsets)[n * 4 + lane_ % 4];
      offsets[n][0] = two.x;
      offsets[n][1] = two.y;
    }
  }

  // Products with the current tile to base-2 exponents of weights, none above the highest.
  __device__ __forceinline__ void ToExponents(const Offsets& offsets, float (&exponents)[kScores]) {
    const float2 growth = Stage(current_).growth;
    const float unit[2] = {unit_[0] * growth.x, unit_[1] * growth.x};
    const float start[2] = {growth.y - base_[0], growth.y - base_[1]};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int half = i % 4 / 2;
      exponents[i] =
          fmaf(scores_[i], unit[half], fmaf(offsets[i / 4][i % 2], query_sum_[half], start[half]));
    }
    // Positive numbers, inf and NaN are in the order of their bits.
    int highest[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      int& one = highest[i / 2 % 4];
      one = __vimax3_s32(one, __float_as_int(exponents[i]), __float_as_int(exponents[i + 1]));
    }
    highest[0] = __vimax3_s32(highest[0], highest[1], max(highest[2], highest[3]));
    must_rescale_ = __any_sync(kFullWarp, highest[0] > kHighestExponent || !has_base_) != 0;
    if (must_rescale_) [[unlikely]] {
      MoveBase(exponents);
    }
  }
  __device__ __forceinline__ static void ToWeights(float (&exponents)[kScores]) {
#pragma unroll
    for (float& exponent : exponents) {
      exponent = Exp2(exponent);
    }
  }

  // Where an exponent is out of range, or there is no base yet. A tile that is not there has no
  // weights.
  __device__ __forceinline__ void MoveBase(float (&exponents)[kScores]) {
    const bool is_missing = isnan(Stage(current_).key_offsets[0]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = -INFINITY;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        highest =
            fmaxf(highest, fmaxf(exponents[4 * n + 2 * half], exponents[4 * n + 2 * half + 1]));
      }
      highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 2));
      const bool moves = !is_missing && (!has_base_ || highest > __int_as_float(kHighestExponent));
      const float raise = moves ? highest - kPrefixHeadroom : 0;
      base_[half] += raise;
      decay_[half] = has_base_ ? Exp2(-raise) : 1;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& exponent = exponents[4 * n + 2 * half + i];
          exponent = is_missing ? -INFINITY : exponent - raise;
        }
      }
    }
    has_base_ = has_base_ || !is_missing;
  }
  __device__ __forceinline__ void Rescale() {
    if (must_rescale_) [[unlikely]] {
      Multiply(outputs_, decay_);
      if constexpr (kIsWide) {
        Multiply(first_outputs_, decay_);
      }
    }
  }
  template <int kCount>
  __device__ __forceinline__ static void Multiply(float (&outputs)[kCount],
                                                  const float (&decay)[2]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      outputs[i] *= decay[i % 4 / 2];
    }
  }
  // As operand A of the products with V.
  __device__ __forceinline__ void PackWeights(const float (&weights)[kScores]) {
#pragma unroll
    for (int i = 0; i < kColumnTiles * 2; ++i) {
      asm volatile("cvt.rn.f16x2.f32 %0, %2, %1;"
                   : "=r"(weights_[i / 4][i % 4])
                   : "f"(weights[2 * i]), "f"(weights[2 * i + 1]));
    }
  }

  template <int kColumns, int kCount>
  __device__ __forceinline__ static void StoreColumns(const float (&outputs)[kCount],
                                                      int half,
                                                      float offset,
                                                      float* out) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      *reinterpret_cast<float2*>(out + 8 * n) =
          make_float2(outputs[4 * n + 2 * half] + offset, outputs[4 * n + 2 * half + 1] + offset);
    }
  }

  const SharedPrefixLaunch& launch_;
  Shared& shared_;
  const uint32_t index_;  // 0 or 1.
  const PrefixRows rows_;
  const int lane_;
  const uint32_t step_;
  Place current_;
  bool has_added_ = false;  // Outputs mean nothing until then.
  // Of rows g and g + 8 of the warp's 16, which are this lane's.
  float unit_[2];           // Of a score, in base-2 exponents.
  float query_sum_[2];      // In them too.
  float base_[2] = {0, 0};  // What weights are relative to, in base-2 exponents.
  float decay_[2];          // What outputs have to be multiplied by, if must_rescale_.
  bool must_rescale_ = false;
  bool has_base_ = false;
  uint32_t queries_[kIsWide ? 1 : kSteps][4];
  uint32_t weights_[4][4];
  float scores_[kScores];
  float first_outputs_[kIsWide ? 64 : 1];  // Of the first 128 of 256 channels.
  // Of the other channels; then, in lanes with t = 0, the sums of weights and of weighted minima.
  float outputs_[(kLastColumns + kPrefixSumRows) / 2];
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace crumb::gpu
