// SPDX-License-Identifier: Apache-2.0
//
// The producers of shared decode's prefix: two warpgroups that make pages into tiles (see
// prefix_tiles.cuh), a half of every tile each. The copy engine brings pages as they are, some
// ahead.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/kernels/code_tiles.cuh"
#include "cuda/kernels/packed.cuh"
#include "cuda/kernels/prefix_tiles.cuh"
#include "cuda/kernels/ptx.cuh"
#include "cuda/launch/decode_workspace.h"
#include "cuda/launch/shared_prefix.h"

namespace crumb::gpu {

#if __CUDA_ARCH__ >= 900

template <int kDim>
class PrefixProducer {
 public:
  using Shared = PrefixShared<kDim>;

  // Of the `num_pages` pages of the prefix from `begin` on, of KV head blockIdx.z. What is more
  // than those of `num_tiles` is as pages that are not there.
  __device__ __forceinline__ PrefixProducer(const SharedPrefixLaunch& launch,
                                            Shared& shared,
                                            uint32_t half,
                                            uint32_t begin,
                                            uint32_t num_pages,
                                            uint32_t num_tiles)
      : launch_(launch),
        shared_(shared),
        half_(half),
        begin_(begin),
        num_pages_(num_pages),
        num_tiles_(num_tiles),
        thread_(threadIdx.x % kWarpgroupThreads),
        lane_(thread_) {}

  __device__ __forceinline__ void Run() {
    const bool is_first_warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0) == 0;
    const std::byte* found = nullptr;
    if (is_first_warp) {
#pragma unroll 1
      for (uint32_t i = 0; i + 1 < Shared::kPages; ++i) {
        Ask(i, found);
      }
    }
    RingPlace<Shared::kStages> place;
#pragma unroll 1
    for (uint32_t i = 0; i < num_tiles_; ++i) {
      if (is_first_warp) {
        Ask(i + Shared::kPages - 1, found);
      }
      const uint32_t slot = i % Shared::kPages;
      BarrierWait(&shared_.page_is_there[slot], i / Shared::kPages % 2);
      Words words;
      Load(shared_.pages[slot], words);
      BarrierWait(&shared_.empty[place.stage], place.parity ^ 1);
      PrefixStage<kDim>& stage = shared_.stages[place.stage];
      StoreMeta(words, stage);
      BarrierArrive(&shared_.page_is_read[slot]);
      StoreKeys(words, stage);
      StoreValues(words, stage);
      AsyncProxyFence();
      BarrierArrive(&shared_.full[place.stage]);
      place.Advance(1);
    }
  }

 private:
  static constexpr uint32_t kKeySteps = kDim / 32;
  static constexpr uint32_t kVectors = kDim == 256 ? 2 : 1;        // Of K a thread, and of V.
  static constexpr uint32_t kFirstOfValues = kDim == 64 ? 64 : 0;  // Thread.

  // What a thread makes of a page.
  struct Words {
    uint32_t keys[kVectors][2];     // Words 2 half_ and 2 half_ + 1 of a vector.
    uint32_t key_scales[kVectors];  // Of tokens g and g + 8.
    uint32_t values[kVectors][2];   // Words half_ and half_ + 2.
    uint32_t value_scales[4];       // Of pairs of tokens, in the order of a chunk.
    __half2 key_meta;               // Of one token.
    __half value_min;
    bool has_small_keys;  // See prefix_tiles.cuh.
    bool has_small_values;

    __device__ __forceinline__ void ShrinkKeys() {
      has_small_keys = true;
#pragma unroll
      for (uint32_t& scales : key_scales) {
        scales = Shrunk(scales);
      }
    }
    __device__ __forceinline__ void ShrinkValues() {
      has_small_values = true;
#pragma unroll
      for (uint32_t& scales : value_scales) {
        scales = Shrunk(scales);
      }
      value_min = __hmul(value_min, __float2half_rn(kShrink));
    }

   private:
    __device__ __forceinline__ static uint32_t Shrunk(uint32_t pair) {
      return AsWord(__hmul2(AsHalves(pair), __float2half2_rn(kShrink)));
    }
  };

  // By the first warp, in order: asks for the page of tile `i`. `found` is the lane's of 32 entries
  // of the table.
  __device__ __forceinline__ void Ask(uint32_t i, const std::byte*& found) const {
    if (i >= num_tiles_) {
      return;
    }
    const uint32_t lane = threadIdx.x % 32;
    if (i % 32 == 0) {
      found = i + lane < num_pages_ ? launch_.prefix.pages[begin_ + i + lane] : nullptr;
    }
    const auto* image = reinterpret_cast<const std::byte*>(
        __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(found), i % 32));
    const uint32_t slot = i % Shared::kPages;
    if (i >= Shared::kPages) {
      BarrierWait(&shared_.page_is_read[slot], (i / Shared::kPages - 1) % 2);
    }
    uint64_t* barrier = &shared_.page_is_there[slot];
    if (image == nullptr) [[unlikely]] {
      if (i < num_pages_ && lane == 0) {
        atomicOr(&static_cast<DecodeFindings*>(launch_.batch.workspace)->problems,
                 kNullHistoryPage);
      }
      FillWithNothing(shared_.pages[slot], lane);
      BarrierArrive(barrier);
    } else if (lane != 0) {
      BarrierArrive(barrier);
    } else {
      constexpr uint32_t kBytes = sizeof(shared_.pages[0]);
      BarrierArriveExpect(barrier, kBytes);
      BulkCopy(shared_.pages[slot],
               image + launch_.prefix.block_offset + blockIdx.z * launch_.prefix.head_stride,
               kBytes, barrier);
    }
  }
  // A page that is not there: zeros, but K's minima are NaN.
  __device__ __forceinline__ static void FillWithNothing(std::byte* block, uint32_t lane) {
    constexpr Int2HeadBlock kFormat{kDim, kDim};
    for (uint32_t i = lane; i < kFormat.bytes() / 4; i += 32) {
      const bool is_key_meta =
          i >= kFormat.key_meta_offset() / 4 && i < kFormat.value_meta_offset() / 4;
      reinterpret_cast<uint32_t*>(block)[i] = is_key_meta ? 0x7fff0000u : 0;
    }
    AsyncProxyFence();  // Before the copy of a page to the same place.
  }

  // Which of K's words is word 0 of `keys[i]`; its 16 tokens.
  __device__ __forceinline__ uint32_t KeyWord(uint32_t i) const {
    return (i * 4 + thread_ / 32) * 4 + half_ * 2;
  }
  __device__ __forceinline__ uint32_t KeyTile(uint32_t i) const {
    return KeyWord(i) / kKeySteps;
  }

  // The lanes of a warp that find a large scale: of K in the lower half, of V in the upper.
  __device__ __forceinline__ static uint32_t FindLargeScales(const std::byte* block) {
    constexpr Int2HeadBlock kFormat{kDim, kDim};
    static_assert(2 * kFormat.meta_bytes() == 32 * sizeof(uint4), "a lane has four tokens");
    const uint4 four =
        *(reinterpret_cast<const uint4*>(block + kFormat.key_meta_offset()) + threadIdx.x % 32);
    const __half2 largest = __hmax2(__hmax2(AsHalves(four.x), AsHalves(four.y)),
                                    __hmax2(AsHalves(four.z), AsHalves(four.w)));
    // Scales are not negative, so they are in the order of their bits.
    return __ballot_sync(kFullWarp, (AsWord(largest) & 0xffffu) >= kLargeScale);
  }

  __device__ __forceinline__ void Load(const std::byte* block, Words& words) const {
    constexpr Int2HeadBlock kFormat{kDim, kDim};
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i) {
      const uint32_t vector = i * kWarpgroupThreads + thread_ / 32 * 32 + lane_.vector();
      if (HasKeys()) {
        const uint2 two = *reinterpret_cast<const uint2*>(block + vector * 16 + half_ * 8);
        words.keys[i][0] = two.x;
        words.keys[i][1] = two.y;
        const uint32_t token = 16 * KeyTile(i) + lane_.row;
        words.key_scales[i] =
            LowHalves(*reinterpret_cast<const uint32_t*>(block + kFormat.KeyMetaByte(token)),
                      *reinterpret_cast<const uint32_t*>(block + kFormat.KeyMetaByte(token + 8)));
      }
      if (HasValues()) {
        const uint4 four = *reinterpret_cast<const uint4*>(block + kFormat.value_codes_offset() +
                                                           (vector - kFirstOfValues) * 16);
        words.values[i][0] = half_ == 0 ? four.x : four.y;
        words.values[i][1] = half_ == 0 ? four.z : four.w;
      }
    }
    if (HasValues()) {
      // Of tokens 16 j + 8 half_ + 4 half + t; pairs are j = 0 and 2, and 1 and 3.
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint4 meta = *reinterpret_cast<const uint4*>(
            block + kFormat.value_meta_offset() + (half * 4 + lane_.chunk) * 32 + half_ * 16);
        words.value_scales[2 * half] = LowHalves(meta.x, meta.z);
        words.value_scales[2 * half + 1] = LowHalves(meta.y, meta.w);
      }
    }
    if (HasMeta()) {
      const uint32_t token = TokenOfTileRow(thread_);
      words.key_meta = *reinterpret_cast<const __half2*>(block + kFormat.KeyMetaByte(token));
      words.value_min = *reinterpret_cast<const __half*>(block + kFormat.ValueMetaByte(token) + 2);
    }
    const uint32_t large = FindLargeScales(block);
    words.has_small_keys = false;
    words.has_small_values = false;
    if (large != 0) [[unlikely]] {
      if ((large & 0xffffu) != 0) {
        words.ShrinkKeys();
      }
      if (large >> 16 != 0) {
        words.ShrinkValues();
      }
    }
  }

  __device__ __forceinline__ bool HasKeys() const {
    return kDim != 64 || thread_ < 64;
  }
  __device__ __forceinline__ bool HasValues() const {
    return kDim != 64 || thread_ >= 64;
  }
  // The first warp has other things to do.
  __device__ __forceinline__ bool HasMeta() const {
    return half_ == 1 && thread_ < kPageTokens;
  }

  __device__ __forceinline__ void StoreMeta(const Words& words, PrefixStage<kDim>& stage) const {
    if (!HasMeta()) {
      return;
    }
    const float2 key = __half22float2(words.key_meta);
    stage.key_offsets[thread_] = key.x + key.y;
    std::byte* ones = stage.values + kDim * kSwizzleRow;
    std::byte* minima = ones + kSwizzleRow;
    *reinterpret_cast<__half*>(ones + thread_ * 2) =
        __float2half_rn(words.has_small_values ? kShrink : 1.0f);
    *reinterpret_cast<__half*>(minima + (thread_ / 8 ^ 1) * 16 + thread_ % 8 * 2) = words.value_min;
    if (thread_ == 0) {
      stage.growth = make_float2(words.has_small_keys ? 1 / kShrink : 1.0f,
                                 words.has_small_values ? kGrowth : 0.0f);
    }
  }

  __device__ __forceinline__ void StoreKeys(const Words& words, PrefixStage<kDim>& stage) const {
    if (!HasKeys()) {
      return;
    }
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i) {
      const __half2 scale[2] = {__low2half2(AsHalves(words.key_scales[i])),
                                __high2half2(AsHalves(words.key_scales[i]))};
      const auto convert = [&](uint32_t code, float times, __half2 its_scale) {
        const __half2 less_one =
            __hfma2(AsHalves(code), __float2half2_rn(times), __float2half2_rn(-1 - times));
        return AsWord(__hmul2(less_one, its_scale));
      };
      const uint32_t j = KeyTile(i);
      const uint32_t row = lane_.first_key_row() + j % 2 * 2 + j / 2;
#pragma unroll
      for (uint32_t w = 0; w < 2; ++w) {
        CodeChunks chunks;
        chunks.Convert(
            words.keys[i][w], [&](uint32_t code, int) { return convert(code, 16, scale[0]); },
            [&](uint32_t code, int) { return convert(code, 4, scale[1]); });
        const uint32_t step = (KeyWord(i) + w) % kKeySteps;
        chunks.Store(stage.keys + step / 2 * kTileBlock, row, 32, step % 2 * 4 + lane_.chunk);
      }
    }
  }

  __device__ __forceinline__ void StoreValues(const Words& words, PrefixStage<kDim>& stage) const {
    if (!HasValues()) {
      return;
    }
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i) {
      const uint32_t tile = (i * 4 + (thread_ - kFirstOfValues) / 32) * 2;  // Of 16 channels.
#pragma unroll
      for (uint32_t w = 0; w < 2; ++w) {
        CodeChunks chunks;
        const auto scale = [&](int k, float times) {
          return __hmul2(AsHalves(words.value_scales[k]), __float2half2_rn(times));
        };
        chunks.Convert(
            words.values[i][w],
            [&](uint32_t code, int k) { return Dequantise(code, scale(k, 16)); },
            [&](uint32_t code, int k) { return Dequantise(code, scale(k, 4)); });
        chunks.Store(stage.values, (tile + w) * 16 + lane_.row, 8, half_ * 4 + lane_.chunk);
      }
    }
  }

  // (1 + c / n) to c * scale, rounded once; `scale` is n times as much.
  __device__ __forceinline__ static uint32_t Dequantise(uint32_t code, __half2 scale) {
    return AsWord(__hfma2(AsHalves(code), scale, __hneg2(scale)));
  }

  const SharedPrefixLaunch& launch_;
  Shared& shared_;
  const uint32_t half_;  // Of every tile that the warpgroup makes.
  const uint32_t begin_;
  const uint32_t num_pages_;
  const uint32_t num_tiles_;
  const uint32_t thread_;
  const TileLane lane_;
};

#endif  // __CUDA_ARCH__ >= 900

}  // namespace crumb::gpu
