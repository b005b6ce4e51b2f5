// SPDX-License-Identifier: Apache-2.0
//
// Expansion of pages with rows rotated back, by warpgroup products: head_dim 64 and 128, compute
// capability 9.0. What is computed is as in expand.cuh, bit for bit.
//
// A warp has sixteen tokens. K's words are the operand A of the product as they are in the page,
// but for shifts and masks; V's codes are transposed through shared memory. Both digits of the
// matrix are operands B there, as long as the head stays the same; sums of the upper ones are
// shifted and the lower ones added, in the same registers.
//
// From there rows go straight to their targets. A product leaves a lane columns 8 n + 2 t and
// 8 n + 2 t + 1; so that it has eight neighbouring elements of a row, 16 bytes, columns of the
// matrix are laid in another order: element 32 j + 8 t + 2 b + i is column 8 (4 j + b) + 2 t + i.
#pragma once

#include <cstdint>

#include "cuda/kernels/expand.cuh"
#include "cuda/kernels/wgmma.cuh"

namespace crumb::gpu {

inline constexpr uint32_t kExpandBackBlocks = 4;  // Of a multiprocessor.

template <int kDim>
struct ExpandBackShared {
  using Transit = ExpandTransit<kDim>;
  static constexpr int kCodeStride = kDim + 16;  // Of a row of V's codes, one a byte.

  alignas(128) std::byte digits[2][kDim * kDim];  // In cores of 16 k x 8 columns, upper ones first.
  Transit transit;
  alignas(16) std::byte value_codes[kPageTokens * kCodeStride];
  // Of two columns. Vectors of 16 bytes that lanes share would be read four times as slowly.
  float2 row_sums[kDim / 2];
  float2 means[kDim / 2];
};

template <int kDim>
class ExpandBackBlock {
 public:
  static constexpr int kThreads = 128;
  static constexpr int kSteps = kDim / 32;
  using Shared = ExpandBackShared<kDim>;

  __device__ __forceinline__ ExpandBackBlock(const ExpandPagesParams& params,
                                             const UnitLine& line,
                                             Shared& shared)
      : params_(params),
        line_(line),
        shared_(shared),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ void Run(uint32_t begin, uint32_t end) {
    const int row = lane_ < kRowsOfWarp ? kRowsOfWarp * warp_ + lane_ : int{kPageTokens};
    WalkUnits<kDim, kThreads>(
        params_, line_, begin, end, static_cast<uint32_t>(row), shared_.transit,
        [&](const ExpandUnit& unit) { TakeHead(unit); },
        [&](bool is_value, const std::byte* part, auto&& look_ahead) {
          Expand(part, is_value, look_ahead);
        });
  }

 private:
  // All warps have multiplied by the matrix of the head before.
  __device__ __forceinline__ void TakeHead(const ExpandUnit& unit) {
    __syncthreads();
    const int thread = ThreadAnew();
    const HeadRecord layout{kDim, params_.heads.is_aware, params_.heads.is_tilted};
    const std::byte* record = unit.record(params_);
    // A lane's two words of an operand are of two cores. Vectors are of two lanes: of a tile, 4 j +
    // t in the order of elements, vector i has element 2 b + i % 4 / 2, b = i % 16 / 4.
#pragma unroll 1
    for (int digit = 0; digit < 2; ++digit) {
      const auto* from = reinterpret_cast<const uint4*>(
          record + layout.rotation(unit.is_value, digit == 0 ? kUnrotateUpper : kUnrotateLower));
#pragma unroll 4
      for (int i = thread; i < kDim * kDim / 16; i += kThreads) {
        const uint4 lanes = from[i];
        const int tile = i / (16 * kSteps);
        const int column = (tile / 4 * 4 + i % 16 / 4) * 8 + tile % 4 * 2 + i % 4 / 2;
        std::byte* cores = shared_.digits[digit] + (column / 8 * kSteps + i / 16 % kSteps) * 256 +
                           column % 8 * 16 + i % 2 * 8;
        *reinterpret_cast<uint2*>(cores) = make_uint2(lanes.x, lanes.z);
        *reinterpret_cast<uint2*>(cores + 128) = make_uint2(lanes.y, lanes.w);
      }
    }
    const auto* sums = reinterpret_cast<const float2*>(record + layout.row_sums(unit.is_value));
    const auto* means = reinterpret_cast<const float2*>(record + layout.mean(unit.is_value));
    for (int i = thread; i < kDim / 2; i += kThreads) {
      const int column = i / 16 * 16 + i % 4 * 4 + i % 16 / 4;
      shared_.row_sums[column] = sums[i];
      shared_.means[column] = means[i];
    }
    const auto* scalars = reinterpret_cast<const HeadScalars*>(record + layout.scalars());
    unit_ = scalars->digit_unit[unit.is_value ? 1 : 0];
    AsyncProxyFence();  // The barrier is that before the unit.
  }

  template <typename LookAhead>
  __device__ __forceinline__ void Expand(const std::byte* part,
                                         bool is_value,
                                         LookAhead&& look_ahead) {
    uint32_t codes[kSteps][4];
    if (is_value) {
      LoadValues(part, codes);
    } else {
      LoadKeys(part, codes);
    }
    int sums[kDim / 2];
    RotateBack(codes, sums);
    look_ahead();  // Products would wait for what is on its way to registers.
    StoreRows(sums, part + Shared::Transit::kCodesBytes);
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
                         *reinterpret_cast<uint32_t*>(shared_.value_codes +
                                                      token * Shared::kCodeStride + channel) =
                             word & 0x03030303u;
                       });
    }
    __syncthreads();
    const std::byte* operand =
        OperandRow(shared_.value_codes + kRowsOfWarp * warp_ * Shared::kCodeStride,
                   Shared::kCodeStride, lane_);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      LoadMatrices(codes[k], operand + k * 32);
    }
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
                                             int (&sums)[kDim / 2]) {
    Multiply(sums, codes, shared_.digits[0], 0);
#pragma unroll
    for (int& sum : sums) {
      sum *= 256;
    }
    Multiply(sums, codes, shared_.digits[1], 1);
  }

  __device__ __forceinline__ void StoreRows(const int (&sums)[kDim / 2], const std::byte* meta) {
    const int t = lane_ % 4;
    float scale[2];
    float min[2];
    std::byte* target[2];
    __syncwarp();  // Targets are there.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = kRowsOfWarp * warp_ + 8 * half + lane_ / 4;
      const float2 of_row = MetaOf(meta, token);
      scale[half] = of_row.x * unit_;
      min[half] = of_row.y;
      target[half] = shared_.transit.targets[token];
      target[half] = target[half] == nullptr ? nullptr : target[half] + t * 16;
    }
#pragma unroll
    for (int j = 0; j < kDim / 32; ++j) {
      uint32_t words[2][4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int n = 4 * j + b;
        const float2 row_sum = shared_.row_sums[4 * n + t];
        const float2 mean = shared_.means[4 * n + t];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto value = [&](int i, float sum, float center) {
            return fmaf(static_cast<float>(sums[4 * n + 2 * half + i]), scale[half],
                        fmaf(min[half], sum, center));
          };
          words[half][b] = PackBf16(value(0, row_sum.x, mean.x), value(1, row_sum.y, mean.y));
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (target[half] != nullptr) {
          __stcs(reinterpret_cast<uint4*>(target[half] + j * 64),
                 make_uint4(words[half][0], words[half][1], words[half][2], words[half][3]));
        }
      }
    }
  }

  const ExpandPagesParams& params_;
  const UnitLine& line_;
  Shared& shared_;
  const int warp_;
  const int lane_;
  float unit_ = 0;
};

template <int kDim>
__global__ __launch_bounds__(128, kExpandBackBlocks) void ExpandBackKernel(
    const __grid_constant__ ExpandPagesParams params, const __grid_constant__ UnitLine line) {
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<ExpandBackShared<kDim>*>(memory);
  const uint32_t num_units = line.num_units(params.num_layers);
  ExpandBackBlock<kDim>(params, line, shared)
      .Run(FirstUnitOf(line, num_units, blockIdx.x), FirstUnitOf(line, num_units, blockIdx.x + 1));
}

}  // namespace crumb::gpu
