// SPDX-License-Identifier: Apache-2.0
//
// The producer of prefill attention on warpgroup products: a warpgroup that makes pages into tiles
// of shared memory that the tensor cores read, and the ring that hands them over.
//
// The codes of an INT2 page become bf16 by a mask alone: two bits at place p of a 16-bit element
// are the subnormal c * 2^(p - 133), which the tensor cores multiply exactly. A word holds codes at
// p = 0, 2, 4 and 6; the powers of two go where they cost nothing:
//   K: 2 by its token's scale, 4 by the queries (the upper 16 of every 32 channels).
//   V: 4 by its token's scale, 2 by the outputs (the upper 8 of every 16 channels).
// Tokens and channels lie in the order of code_tiles.cuh. Windows' rows are copied as they are, in
// theirs.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "crumb/cuda/prefill_attention.h"
#include "cuda/kernels/code_tiles.cuh"
#include "cuda/kernels/mma.cuh"
#include "cuda/kernels/ptx.cuh"
#include "proto/page/page_format.h"

namespace crumb::gpu {

inline constexpr int kPrefillGroups = 2;  // Warpgroups that multiply, 64 rows each.
inline constexpr int kPrefillGroupRows = 64;
inline constexpr int kPrefillStages = 4;

// Operands are multiplied by this so that products of subnormals are normal numbers.
inline constexpr float kLift = 0x1p64f;
inline constexpr float kCodeUnit = 0x1p69f;  // 2^133 / kLift.

// One page.
template <int kDim>
struct PrefillStage {
  alignas(1024) std::byte keys[kPageTokens * kDim * 2];  // [64 channels a block][token]
  std::byte values[kPageTokens * kDim * 2];  // INT2: [channel][64 tokens]; BF16: as keys.
  // Of INT2, for two neighbouring rows: their scales, then their minima.
  float4 key_meta[kPageTokens / 2];
  float4 value_meta[kPageTokens / 2];
};

template <int kDim>
struct PrefillRing {
  PrefillStage<kDim> stages[kPrefillStages];
  uint64_t full[kPrefillStages];
  uint64_t empty[kPrefillStages];

  __device__ __forceinline__ void Init() {
    for (int i = 0; i < kPrefillStages; ++i) {
      BarrierInit(&full[i], kWarpgroupThreads);
      BarrierInit(&empty[i], kPrefillGroups * kWarpgroupThreads);
    }
    BarrierInitFence();
  }
};

#if __CUDA_ARCH__ >= 900

template <int kDim>
class PrefillProducer {
 public:
  // `num_tiles`: pages of history, then of windows.
  __device__ __forceinline__ PrefillProducer(const PrefillAttentionParams& params,
                                             PrefillRing<kDim>& ring,
                                             uint32_t num_tiles)
      : params_(params),
        ring_(ring),
        num_tiles_(num_tiles),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroupThreads),
        lane_row_(thread_ % 8 / 4 * 4 + thread_ % 32 / 8),
        lane_chunk_(thread_ % 4) {}

  __device__ __forceinline__ void Run() {
    MakeHistory();
    MakeWindows();
  }

 private:
  // What a thread unpacks of a page.
  struct Words {
    uint4 keys;
    uint4 values;
    __half2 key_meta;
    __half2 value_meta;
  };

  // Null behind the last page. What is loaded of a null page is zero.
  __device__ __forceinline__ const std::byte* HistoryImage(uint32_t page) const {
    return page < params_.history_pages ? params_.history.pages[page] : nullptr;
  }

  // Waits until the stage of tile `index` may be written.
  __device__ __forceinline__ PrefillStage<kDim>& Acquire(uint32_t index) {
    const uint32_t stage = index % kPrefillStages;
    if (index >= kPrefillStages) {
      BarrierWait(&ring_.empty[stage], (index / kPrefillStages - 1) % 2);
    }
    return ring_.stages[stage];
  }
  __device__ __forceinline__ void Publish(uint32_t index) {
    AsyncProxyFence();
    BarrierArrive(&ring_.full[index % kPrefillStages]);
  }

  // Words are asked for kAhead pages before they are unpacked, and where they are as long before
  // that. No register moves on before what was loaded into it is needed.
  __device__ __forceinline__ void MakeHistory() {
    const std::byte* images[kAhead];
    Words words[kAhead];
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      words[i] = Load(HistoryImage(i));
      images[i] = HistoryImage(i + kAhead);
    }
#pragma unroll 1
    for (uint32_t first = 0; first < params_.history_pages; first += kAhead) {
#pragma unroll
      for (uint32_t i = 0; i < kAhead; ++i) {
        const uint32_t page = first + i;
        if (page < params_.history_pages) {
          Unpack(words[i], Acquire(page));
          Publish(page);
          words[i] = Load(images[i]);
          images[i] = HistoryImage(page + 2 * kAhead);
        }
      }
    }
  }

  __device__ __forceinline__ Words Load(const std::byte* image) const {
    constexpr Int2HeadBlock kFormat{kDim, kDim};
    Words words = {};
    if (image == nullptr) {
      return words;
    }
    const std::byte* block =
        image + params_.history.block_offset + blockIdx.y * params_.history.head_stride;
    const int vector = thread_ / 32 * 32 + lane_row_ * 4 + lane_chunk_;
    if (thread_ < kDim) {
      words.keys = __ldg(reinterpret_cast<const uint4*>(block) + vector);
    }
    if (thread_ >= kFirstOfValues) {
      words.values = __ldg(reinterpret_cast<const uint4*>(block + kFormat.value_codes_offset()) +
                           vector - kFirstOfValues);
    }
    if (thread_ < int{kPageTokens}) {
      const uint32_t token = TokenOfTileRow(static_cast<uint32_t>(thread_));
      words.key_meta = *reinterpret_cast<const __half2*>(block + kFormat.KeyMetaByte(token));
      words.value_meta = *reinterpret_cast<const __half2*>(block + kFormat.ValueMetaByte(token));
    }
    return words;
  }

  __device__ __forceinline__ void Unpack(const Words& words, PrefillStage<kDim>& stage) const {
    if (thread_ < kDim) {
      UnpackKeys(words.keys, stage.keys);
    }
    if (thread_ >= kFirstOfValues) {
      UnpackValues(words.values, stage.values);
    }
    if (thread_ < int{kPageTokens}) {
      const float2 key = __half22float2(words.key_meta);
      const float2 value = __half22float2(words.value_meta);
      const float scale = params_.scale * 1.4426950408889634f;  // Into base-2 exponents.
      const bool is_key_upper = thread_ >= 32;
      const bool is_value_upper = thread_ % 8 >= 4;
      auto* keys = reinterpret_cast<float*>(&stage.key_meta[thread_ / 2]) + thread_ % 2;
      keys[0] = key.x * scale * (is_key_upper ? kCodeUnit / 4 : kCodeUnit);
      keys[2] = key.y * scale;
      auto* values = reinterpret_cast<float*>(&stage.value_meta[thread_ / 2]) + thread_ % 2;
      values[0] = value.x * (is_value_upper ? kLift / 16 : kLift);
      values[2] = value.y;
    }
  }

  // Lane (g, t): rows g and g + 8 of 16 tokens, a chunk a step of 32 channels.
  __device__ __forceinline__ void UnpackKeys(const uint4& vector, std::byte* keys) const {
    constexpr int kSteps = kDim / 32;
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int index = thread_ / 32 * 4 + w;
      const int j = index / kSteps;
      const int step = index % kSteps;
      const int row = 8 * (lane_row_ % 4) + lane_row_ / 4 * 4 + j % 2 * 2 + j / 2;
      std::byte* block = keys + step / 2 * kTileBlock;
      StoreChunks(block, row, row + 32, step % 2 * 4 + lane_chunk_, words[w]);
    }
  }

  // Lane (g, t): channels g and g + 8 of 16, the chunk of eight tokens 4 kk + t.
  __device__ __forceinline__ void UnpackValues(const uint4& vector, std::byte* values) const {
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int index = (thread_ - kFirstOfValues) / 32 * 4 + w;
      const int channel = index / 2 * 16 + lane_row_;
      StoreChunks(values, channel, channel + 8, w % 2 * 4 + lane_chunk_, words[w]);
    }
  }

  // The codes of places 0 and 4 to a chunk of row `lower`, those of 2 and 6 to one of `upper`.
  __device__ __forceinline__ static void StoreChunks(
      std::byte* block, int lower, int upper, int chunk, uint32_t word) {
    const uint32_t odd = word >> 8;
    const int place = (chunk ^ (lower % 8)) * 16;  // Of upper too: their rows differ by eights.
    *reinterpret_cast<uint4*>(block + lower * kSwizzleRow + place) =
        make_uint4(word & 0x00030003u, odd & 0x00030003u, word & 0x00300030u, odd & 0x00300030u);
    *reinterpret_cast<uint4*>(block + upper * kSwizzleRow + place) =
        make_uint4(word & 0x000c000cu, odd & 0x000c000cu, word & 0x00c000c0u, odd & 0x00c000c0u);
  }

  // A tile is handed over once the copies of the next are on their way.
  __device__ __forceinline__ void MakeWindows() {
#pragma unroll 1
    for (uint32_t index = params_.history_pages; index < num_tiles_; ++index) {
      const uint32_t page = index - params_.history_pages;
      const std::byte* image = params_.windows.pages[page];
      // Of a null page no rows: all of them become zero.
      const uint32_t count =
          image == nullptr ? 0 : min(params_.window_tokens - page * kPageTokens, kPageTokens);
      const std::byte* block =
          image + params_.windows.block_offset + blockIdx.y * params_.windows.head_stride;
      CopyRows(block, static_cast<int>(count), Acquire(index));
      CommitCopies();
      if (page > 0) {
        WaitForCopies<1>();
        Publish(index - 1);
      }
    }
    WaitForCopies<0>();
    Publish(num_tiles_ - 1);  // There is a window: a chunk is part of it.
  }

  // `count` rows of BF16; the others become zero.
  __device__ __forceinline__ void CopyRows(const std::byte* block,
                                           int count,
                                           PrefillStage<kDim>& stage) const {
    constexpr int kChunks = kDim / 8;
    constexpr Bf16HeadBlock kFormat{kDim, kDim};
#pragma unroll 4
    for (int i = thread_; i < int{kPageTokens} * kChunks; i += kWarpgroupThreads) {
      const int row = i / kChunks;
      const int chunk = i % kChunks;
      const uint32_t to =
          chunk / 8 * kTileBlock + row * kSwizzleRow + ((chunk % 8) ^ (row % 8)) * 16;
      if (row < count) {
        const std::byte* from = block + i * 16;
        CopyAsync16(stage.keys + to, from + kFormat.key_offset());
        CopyAsync16(stage.values + to, from + kFormat.value_offset());
      } else {
        *reinterpret_cast<uint4*>(stage.keys + to) = make_uint4(0, 0, 0, 0);
        *reinterpret_cast<uint4*>(stage.values + to) = make_uint4(0, 0, 0, 0);
      }
    }
  }

  static constexpr uint32_t kAhead = 3;
  static constexpr int kFirstOfValues = kWarpgroupThreads - kDim;  // Thread.
  static_assert(kDim == 64 || kDim == 128, "a thread has a vector of K's codes and one of V's");

  const PrefillAttentionParams& params_;
  PrefillRing<kDim>& ring_;
  const uint32_t num_tiles_;
  const int thread_;
  // Lane (g, t) of the page format: eight neighbouring threads have g and g + 4 so that their
  // chunks meet no bank twice.
  const int lane_row_;
  const int lane_chunk_;
};

#endif  // __CUDA_ARCH__ >= 900

}  // namespace crumb::gpu
