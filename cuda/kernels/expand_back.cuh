// SPDX-License-Identifier: Apache-2.0
//
// Expansion of pages with rows rotated back, by warpgroup products: head_dim 64 and 128, compute
// capability 9.0. What is computed is as in expand.cuh, bit for bit.
//
// A warp has sixteen tokens. K's words are the operand A of the product as they are in the page,
// but for shifts and masks; V's codes are transposed through shared memory. Both digits of the
// matrix are operands B there, as long as the head stays the same; sums of the upper ones are
// shifted and the lower ones added, in the same registers.
#pragma once

#include <cstdint>

#include "cuda/kernels/expand.cuh"
#include "cuda/kernels/wgmma.cuh"

namespace crumb::gpu {

inline constexpr uint32_t kExpandBackBlocks = 4;  // Of a multiprocessor.

template <int kDim>
struct ExpandBackShared {
  static constexpr Int2HeadBlock kFormat{kDim, kDim};
  static constexpr uint32_t kCodesBytes = static_cast<uint32_t>(kFormat.key_codes_bytes());
  static constexpr uint32_t kPartBytes = kCodesBytes + static_cast<uint32_t>(kFormat.meta_bytes());
  static constexpr int kCodeStride = kDim + 16;  // Of a row of V's codes, one a byte.
  static constexpr int kRowsOfWarpBytes = kRowsOfWarp * static_cast<int>(PageTile<kDim>::kStride);

  alignas(128) std::byte digits[2][kDim * kDim];  // In cores of 16 k x 8 columns, upper ones first.
  alignas(16) std::byte parts[2][kPartBytes];     // As loaded: codes, then meta.
  // Each warp's rows; before them, in the same place, their codes.
  alignas(16) std::byte rows[PageTile<kDim>::kBytes];
  // Of two channels. Vectors of 16 bytes that lanes share would be read four times as slowly.
  float2 row_sums[kDim / 2];
  float2 means[kDim / 2];
  std::byte* targets[kPageTokens];
};

template <int kDim>
class ExpandBackBlock {
 public:
  static constexpr int kThreads = 128;
  static constexpr int kSteps = kDim / 32;
  using Shared = ExpandBackShared<kDim>;
  using Tile = PageTile<kDim>;

  __device__ __forceinline__ ExpandBackBlock(const ExpandPagesParams& params,
                                             const UnitLine& line,
                                             Shared& shared)
      : params_(params),
        line_(line),
        shared_(shared),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        rows_(shared.rows + warp_ * Shared::kRowsOfWarpBytes) {}

  __device__ __forceinline__ void Run(uint32_t begin, uint32_t end) {
    if (begin == end) {
      return;
    }
    const Divider by_block_tokens(params_.block_tokens);
    const auto place_of = [&](const ExpandUnit& unit) {
      return lane_ < kRowsOfWarp ? unit.PlaceOf(params_, by_block_tokens,
                                                static_cast<uint32_t>(kRowsOfWarp * warp_ + lane_))
                                 : RowPlace{};
    };
    ExpandUnit unit(line_, begin);
    LoadPartAsync<kDim, kThreads>(shared_.parts[0], unit.Block(params_, unit.source(params_)),
                                  unit.is_value);
    RowPlace place = place_of(unit);
    ExpandUnit next = unit;
    bool same_head = false;
    bool next_has_same_head = next.Advance(line_);
    const std::byte* source = next.source(params_);
    for (uint32_t index = begin; index < end; ++index) {
      if (!same_head) {
        TakeHead(unit);
      }
      WaitForCopies<0>();
      __syncthreads();
      const std::byte* part = shared_.parts[(index - begin) % 2];
      if (index + 1 < end) {
        LoadPartAsync<kDim, kThreads>(shared_.parts[(index + 1 - begin) % 2],
                                      next.Block(params_, source), next.is_value);
      }
      if (lane_ < kRowsOfWarp) {
        shared_.targets[kRowsOfWarp * warp_ + lane_] = unit.TargetOf(params_, place);
      }
      if (index + 1 < end) {
        place = place_of(next);
      }
      uint32_t codes[kSteps][4];
      if (unit.is_value) {
        LoadValues(part, codes);
      } else {
        LoadKeys(part, codes);
      }
      RotateBack(codes, part + Shared::kCodesBytes);
      __syncwarp();
      StoreRows();
      unit = next;
      same_head = next_has_same_head;
      next_has_same_head = next.Advance(line_);
      source = next.source(params_);
    }
  }

 private:
  // All warps have multiplied by the matrix of the head before.
  __device__ __forceinline__ void TakeHead(const ExpandUnit& unit) {
    __syncthreads();
    const HeadRecord layout{kDim, params_.heads.is_aware, params_.heads.is_tilted};
    const std::byte* record = unit.record(params_);
    // An operand's two words of a lane are of two cores.
#pragma unroll 1
    for (int digit = 0; digit < 2; ++digit) {
      const auto* from = reinterpret_cast<const uint4*>(
          record + layout.rotation(unit.is_value, digit == 0 ? kUnrotateUpper : kUnrotateLower));
#pragma unroll 4
      for (int i = static_cast<int>(threadIdx.x); i < kDim * kDim / 16; i += kThreads) {
        const uint4 lanes = from[i];
        std::byte* cores = shared_.digits[digit] + i / 16 * 256 + i % 16 * 8;
        *reinterpret_cast<uint2*>(cores) = make_uint2(lanes.x, lanes.z);
        *reinterpret_cast<uint2*>(cores + 128) = make_uint2(lanes.y, lanes.w);
      }
    }
    const auto* sums = reinterpret_cast<const float2*>(record + layout.row_sums(unit.is_value));
    const auto* means = reinterpret_cast<const float2*>(record + layout.mean(unit.is_value));
    for (int i = static_cast<int>(threadIdx.x); i < kDim / 2; i += kThreads) {
      shared_.row_sums[i] = sums[i];
      shared_.means[i] = means[i];
    }
    const auto* scalars = reinterpret_cast<const HeadScalars*>(record + layout.scalars());
    unit_ = scalars->digit_unit[unit.is_value ? 1 : 0];
    AsyncProxyFence();  // The barrier is that before the unit.
  }

  __device__ __forceinline__ void LoadKeys(const std::byte* part, uint32_t (&codes)[kSteps][4]) {
    const auto* words = reinterpret_cast<const uint32_t*>(part) +
                        Int2HeadBlock::WordIndex(static_cast<uint32_t>(warp_ * kSteps),
                                                 static_cast<uint32_t>(lane_));
    uint32_t mine[kSteps];
    if constexpr (kSteps == 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(words);
      mine[0] = four.x;
      mine[1] = four.y;
      mine[2] = four.z;
      mine[3] = four.w;
    } else {
      const uint2 two = *reinterpret_cast<const uint2*>(words);
      mine[0] = two.x;
      mine[1] = two.y;
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        codes[k][i] = mine[k] >> (2 * i) & 0x03030303u;
      }
    }
  }

  // Also a barrier.
  __device__ __forceinline__ void LoadValues(const std::byte* part, uint32_t (&codes)[kSteps][4]) {
    // In an order in which a warp's stores meet few banks twice.
    const int index = lane_ / 8 % 2 + 2 * warp_ + kDim / 16 * (lane_ / 16);
    if (kDim == 128 || warp_ < kDim / 32) {
      UnpackValueWords(reinterpret_cast<const uint32_t*>(part), 8 * index + lane_ % 8,
                       [&](int token, int channel, uint32_t word) {
                         std::byte* row = shared_.rows +
                                          token / kRowsOfWarp * Shared::kRowsOfWarpBytes +
                                          token % kRowsOfWarp * Shared::kCodeStride;
                         *reinterpret_cast<uint32_t*>(row + channel) = word & 0x03030303u;
                       });
    }
    __syncthreads();
    const std::byte* operand = OperandRow(rows_, Shared::kCodeStride, lane_);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      LoadMatrices(codes[k], operand + k * 32);
    }
    __syncwarp();  // Rows may take their place.
  }

  __device__ __forceinline__ void Multiply(int (&sums)[kDim / 2],
                                           const uint32_t (&codes)[kSteps][4],
                                           const std::byte* digits,
                                           int accumulate) {
    if constexpr (kHasWarpgroups) {
      const uint64_t matrix = WgmmaDescriptor(digits, 128, kDim * 8);
      WgmmaFence();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        WgmmaU8S8<kDim>::Run(sums, codes[k], matrix + k * (256 >> 4), k > 0 ? 1 : accumulate);
      }
      WgmmaCommit();
      WgmmaWaitAll();
      WgmmaHold(sums);
    }
  }

  __device__ __forceinline__ void RotateBack(const uint32_t (&codes)[kSteps][4],
                                             const std::byte* meta) {
    int sums[kDim / 2];
    Multiply(sums, codes, shared_.digits[0], 0);
#pragma unroll
    for (int& sum : sums) {
      sum *= 256;
    }
    Multiply(sums, codes, shared_.digits[1], 1);
    const int g = lane_ / 4;
    const int t = lane_ % 4;
    const float2 row[2] = {MetaOf(meta, kRowsOfWarp * warp_ + g),
                           MetaOf(meta, kRowsOfWarp * warp_ + 8 + g)};
    const float scale[2] = {row[0].x * unit_, row[1].x * unit_};
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const float2 row_sum = shared_.row_sums[4 * n + t];
      const float2 mean = shared_.means[4 * n + t];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto value = [&](int i, float sum, float center) {
          return fmaf(static_cast<float>(sums[4 * n + 2 * half + i]), scale[half],
                      fmaf(row[half].y, sum, center));
        };
        *reinterpret_cast<uint32_t*>(rows_ + (8 * half + g) * int{Tile::kStride} + n * 16 + t * 4) =
            PackBf16(value(0, row_sum.x, mean.x), value(1, row_sum.y, mean.y));
      }
    }
  }

  __device__ __forceinline__ void StoreRows() {
    constexpr int kChunks = Tile::kRowBytes / 16;
#pragma unroll
    for (int i = lane_; i < kRowsOfWarp * kChunks; i += 32) {
      std::byte* target = shared_.targets[kRowsOfWarp * warp_ + i / kChunks];
      if (target != nullptr) {
        __stcs(reinterpret_cast<uint4*>(target + i % kChunks * 16),
               *reinterpret_cast<const uint4*>(rows_ + i / kChunks * int{Tile::kStride} +
                                               i % kChunks * 16));
      }
    }
  }

  const ExpandPagesParams& params_;
  const UnitLine& line_;
  Shared& shared_;
  const int warp_;
  const int lane_;
  std::byte* const rows_;
  float unit_ = 0;
};

template <int kDim>
__global__ __launch_bounds__(128, kExpandBackBlocks) void ExpandBackKernel(
    const __grid_constant__ ExpandPagesParams params, const __grid_constant__ UnitLine line) {
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<ExpandBackShared<kDim>*>(memory);
  const uint32_t num_units = line.num_units(params.num_layers);
  ExpandBackBlock<kDim>(params, line, shared)
      .Run(FirstUnitOf(num_units, blockIdx.x), FirstUnitOf(num_units, blockIdx.x + 1));
}

}  // namespace crumb::gpu
