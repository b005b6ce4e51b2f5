// SPDX-License-Identifier: Apache-2.0
//
// Expansion of pages: load a head block's K or V, unpack the codes, rotate back, store rows.
//
// A row of head_dim 128 is 36 bytes in and 256 out: at an H200's copy bandwidth of 4.3 TB/s, 14.7
// million rows a millisecond. x = (code * s + min) R^T + mean is computed as
//
//   s * unit * (256 * code U^T + code L^T) + min * sums + mean,     R = unit * (256 U + L),
//
// with both products exact on the integer tensor cores: 4 d^2 operations of a byte a row. As
// stored, a row has four numbers, which its codes look up.
//
// grid = [blocks], each a contiguous share of the units (page_unit.cuh): a warp keeps its columns
// of R^T in registers while the head stays the same. The next unit's codes arrive while this one's
// rows are made. Where warpgroups multiply, expand_back.cuh rotates.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/kernels/expand_unit.cuh"
#include "cuda/kernels/page_rows.cuh"
#include "cuda/kernels/unpack_codes.cuh"

namespace crumb::gpu {

template <int kDim>
inline constexpr int kExpandWarps = kDim == 256 ? 8 : 4;
template <int kDim, ExpandSpace kSpace>
inline constexpr int kExpandBlocks = kSpace == ExpandSpace::kModel ? (kDim == 256 ? 1 : 4)
                                                                   : (kDim == 256 ? 4 : 8);

template <int kDim, ExpandSpace kSpace>
struct ExpandShared {
  using Transit = ExpandTransit<kDim>;
  static constexpr uint32_t kCodeStride = kDim + 16;  // Of a row of codes, one a byte.

  // Model space: codes [token, channel].
  struct Codes {
    alignas(16) std::byte codes[kPageTokens * kCodeStride];
  };
  // As stored: a token's numbers of codes 0 to 3 in bf16, their lower bytes and their upper ones.
  struct Levels {
    uint2 levels[kPageTokens];
  };

  Transit transit;
  std::conditional_t<kSpace == ExpandSpace::kModel, Codes, Levels> unpacked;
  alignas(16) std::byte rows[PageTile<kDim>::kBytes];
};

// Scale and minimum of a token.
__device__ __forceinline__ float2 MetaOf(const std::byte* meta, int token) {
  return __half22float2(reinterpret_cast<const __half2*>(
      meta)[Int2HeadBlock::MetaIndex(static_cast<uint32_t>(token))]);
}

// c += A x B with A[16 x 32] of unsigned and B[32 x 8] of signed bytes is MmaU8S8 (ptx.cuh).
template <int kDim, int kWarps>
struct UnrotationColumns {
  static constexpr int kTiles = kDim / 8 / kWarps;
  static constexpr int kSteps = kDim / 32;
  uint2 upper[kTiles][kSteps];
  uint2 lower[kTiles][kSteps];

  __device__ __forceinline__ void Load(
      const std::byte* record, const HeadRecord& layout, bool is_value, int warp, int lane) {
    const int first = warp * kTiles * kSteps * 32 + lane;
    const auto* from_upper =
        reinterpret_cast<const uint2*>(record + layout.rotation(is_value, kUnrotateUpper)) + first;
    const auto* from_lower =
        reinterpret_cast<const uint2*>(record + layout.rotation(is_value, kUnrotateLower)) + first;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        upper[n][k] = from_upper[(n * kSteps + k) * 32];
        lower[n][k] = from_lower[(n * kSteps + k) * 32];
      }
    }
  }
};

template <int kDim, ExpandSpace kSpace>
class ExpandBlock {
 public:
  static constexpr int kWarps = kExpandWarps<kDim>;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr bool kRotatesBack = kSpace == ExpandSpace::kModel;
  using Shared = ExpandShared<kDim, kSpace>;
  using Tile = PageTile<kDim>;

  __device__ __forceinline__ ExpandBlock(const ExpandPagesParams& params,
                                         const UnitLine& line,
                                         Shared& shared)
      : params_(params),
        line_(line),
        shared_(shared),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ void Run(uint32_t begin, uint32_t end) {
    WalkUnits<kDim, kThreads>(
        params_, line_, begin, end, threadIdx.x, shared_.transit,
        [&](const ExpandUnit& unit) { TakeHead(unit); },
        [&](bool is_value, const std::byte* part, auto&& look_ahead) {
          look_ahead();
          Expand(part, is_value);
        });
  }

 private:
  __device__ __forceinline__ void TakeHead(const ExpandUnit& unit) {
    if constexpr (kRotatesBack) {
      const HeadRecord layout{kDim, params_.heads.is_aware, params_.heads.is_tilted};
      const std::byte* record = unit.record(params_);
      columns_.Load(record, layout, unit.is_value, warp_, lane_);
      const auto* scalars = reinterpret_cast<const HeadScalars*>(record + layout.scalars());
      unit_ = scalars->digit_unit[unit.is_value ? 1 : 0];
      sums_ = reinterpret_cast<const float*>(record + layout.row_sums(unit.is_value));
      mean_ = reinterpret_cast<const float*>(record + layout.mean(unit.is_value));
    }
  }

  __device__ __forceinline__ void Expand(const std::byte* part, bool is_value) {
    const std::byte* meta = part + Shared::Transit::kCodesBytes;
    if constexpr (kRotatesBack) {
      Unpack(part, is_value);
      __syncthreads();
      RotateBack(meta);
    } else {
      FindLevels(meta);
      __syncthreads();
      Unpack(part, is_value);
    }
    __syncthreads();
    StoreRows();
  }

  // As stored, to rows; else codes to a byte each.
  __device__ __forceinline__ void Unpack(const std::byte* part, bool is_value) {
    const auto store = [&](int token, int channel, uint32_t word) {
      if constexpr (kRotatesBack) {
        *reinterpret_cast<uint32_t*>(shared_.unpacked.codes + token * Shared::kCodeStride +
                                     channel) = word & 0x03030303u;
      } else {
        const uint2 levels = shared_.unpacked.levels[token];
        *reinterpret_cast<uint2*>(shared_.rows + token * Tile::kStride + channel * 2) =
            LookUpCodes(word, levels.x, levels.y);
      }
    };
    for (int i = static_cast<int>(threadIdx.x); i < kDim; i += kThreads) {
      if (is_value) {
        UnpackValueWords(reinterpret_cast<const uint32_t*>(part), i, store);
      } else {
        UnpackKeyVector<kDim>(reinterpret_cast<const uint4*>(part), i, store);
      }
    }
  }

  // Stored space: code * scale + min of every code.
  __device__ __forceinline__ void FindLevels(const std::byte* meta) {
    const int token = static_cast<int>(threadIdx.x);
    if (token >= int{kPageTokens}) {
      return;
    }
    const float2 row = MetaOf(meta, token);
    const auto value = [&](float code) { return __fadd_rn(__fmul_rn(code, row.x), row.y); };
    const uint32_t first = PackBf16(value(0), value(1));
    const uint32_t second = PackBf16(value(2), value(3));
    shared_.unpacked.levels[token] =
        make_uint2(__byte_perm(first, second, 0x6420), __byte_perm(first, second, 0x7531));
  }

  // Model space; every warp its columns of all rows.
  __device__ __forceinline__ void RotateBack(const std::byte* meta) {
    using Columns = UnrotationColumns<kDim, kWarps>;
    const int g = lane_ / 4;
    const int t = lane_ % 4;
    const int first_column = warp_ * Columns::kTiles * 8 + 2 * t;
#pragma unroll 1
    for (int tile = 0; tile < int{kPageTokens}; tile += 16) {
      int upper[Columns::kTiles][4] = {};
      int lower[Columns::kTiles][4] = {};
      const std::byte* operand = OperandRow(shared_.unpacked.codes + tile * Shared::kCodeStride,
                                            Shared::kCodeStride, lane_);
#pragma unroll
      for (int k = 0; k < Columns::kSteps; ++k) {
        uint32_t a[4];
        LoadMatrices(a, operand + k * 32);
#pragma unroll
        for (int n = 0; n < Columns::kTiles; ++n) {
          MmaU8S8(upper[n], a, columns_.upper[n][k].x, columns_.upper[n][k].y);
          MmaU8S8(lower[n], a, columns_.lower[n][k].x, columns_.lower[n][k].y);
        }
      }
      const float2 row[2] = {MetaOf(meta, tile + g), MetaOf(meta, tile + 8 + g)};
#pragma unroll
      for (int n = 0; n < Columns::kTiles; ++n) {
        const int column = first_column + 8 * n;
        const float2 sums = *reinterpret_cast<const float2*>(sums_ + column);
        const float2 mean = *reinterpret_cast<const float2*>(mean_ + column);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float scale = row[half].x * unit_;
          const auto value = [&](int i, float sum, float center) {
            const int product = 256 * upper[n][i] + lower[n][i];
            return fmaf(static_cast<float>(product), scale, fmaf(row[half].y, sum, center));
          };
          *reinterpret_cast<uint32_t*>(shared_.rows + (tile + 8 * half + g) * Tile::kStride +
                                       column * 2) =
              PackBf16(value(2 * half, sums.x, mean.x), value(2 * half + 1, sums.y, mean.y));
        }
      }
    }
  }

  __device__ __forceinline__ void StoreRows() {
    constexpr int kChunks = Tile::kRowBytes / 16;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < int{kPageTokens} * kChunks; i += kThreads) {
      const int row = i / kChunks;
      const int chunk = i % kChunks;
      std::byte* target = shared_.transit.targets[row];
      if (target != nullptr) {
        __stcs(reinterpret_cast<uint4*>(target + chunk * 16),
               *reinterpret_cast<const uint4*>(shared_.rows + row * Tile::kStride + chunk * 16));
      }
    }
  }

  const ExpandPagesParams& params_;
  const UnitLine& line_;
  Shared& shared_;
  const int warp_;
  const int lane_;
  UnrotationColumns<kDim, kWarps> columns_;
  float unit_ = 0;
  const float* sums_ = nullptr;
  const float* mean_ = nullptr;
};

template <int kDim, ExpandSpace kSpace>
__global__
__launch_bounds__(32 * kExpandWarps<kDim>, (kExpandBlocks<kDim, kSpace>)) void ExpandKernel(
    const __grid_constant__ ExpandPagesParams params, const __grid_constant__ UnitLine line) {
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<ExpandShared<kDim, kSpace>*>(memory);
  const uint32_t num_units = line.num_units(params.num_layers);
  ExpandBlock<kDim, kSpace>(params, line, shared)
      .Run(FirstUnitOf(line, num_units, blockIdx.x), FirstUnitOf(line, num_units, blockIdx.x + 1));
}

}  // namespace crumb::gpu
