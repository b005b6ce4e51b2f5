// SPDX-License-Identifier: Apache-2.0
//
// Demotion of pages, oscar-int2-aware and oscar-int2-tilted: keys are rounded with feedback
// (round_aware.cuh), values to nearest. Keys are nearly all of the time.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/kernels/demote.cuh"
#include "cuda/kernels/round_aware.cuh"

namespace crumb::gpu {

// Rounding with feedback takes much shared memory a warp: at 256, four of the eight do it.
inline constexpr int kAwareWarps = 4;

template <int kDim, bool kTilted>
struct DemoteAwareShared {
  using Tile = PageTile<kDim>;
  struct Empty {};
  struct Sums {
    float4 row_sums[RotateByWarps<kDim>::kWarps * kPageTokens];
  };

  alignas(16) std::byte tiles[2][Tile::kBytes];
  union {
    alignas(16) uint32_t key_words[kPageTokens * Tile::kWordStride];
    DemotedPart<kDim> part;
  };
  alignas(16) __half2 key_meta[kPageTokens];
  AwareScratch<kDim> scratch[kAwareWarps];
  alignas(16) std::byte diagonal[kDim / 16 * HeadRecord::kDiagonalBytes];
  [[no_unique_address]] std::conditional_t<kTilted, Sums, Empty> sums;
};

template <int kDim, bool kTilted>
class DemoteAwareBlock {
 public:
  static constexpr int kWarps = RotateByWarps<kDim>::kWarps;
  static constexpr int kThreads = 32 * kWarps;
  using Shared = DemoteAwareShared<kDim, kTilted>;
  using Tile = PageTile<kDim>;

  __device__ __forceinline__ DemoteAwareBlock(const DemotePagesParams& params, Shared& shared)
      : params_(params),
        shared_(shared),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ void Run(uint32_t begin, uint32_t end) {
    if (begin == end) {
      return;
    }
    DemoteUnit unit(params_, begin);
    LoadUnit(unit, 0);
    bool same_head = false;
    for (uint32_t index = begin; index < end; ++index) {
      if (!same_head) {
        TakeHead(unit);
      }
      WaitForCopies<0>();
      __syncthreads();
      const uint32_t current = params_.rows_are_rotated ? (index - begin) % 2 : 1;
      if (!params_.rows_are_rotated) {
        Rotate(unit);
      }
      // Whitened rows take the place of the next ones.
      DemoteUnit next = unit;
      same_head = next.Advance(params_);
      const uint32_t free_tile = params_.rows_are_rotated ? 1 - current : 0;
      const bool loads_late = kTilted && !unit.is_value;
      if (index + 1 < end && !loads_late) {
        LoadUnit(next, free_tile);
      }
      const int bad_token = unit.is_value
                                ? RoundValues(shared_.tiles[current])
                                : RoundKeys(shared_.tiles[current], shared_.tiles[free_tile]);
      const bool is_bad = bad_token < int{kPageTokens};
      if (is_bad) {
        unit.Report(params_, bad_token);
      }
      const bool any_bad = __syncthreads_or(is_bad ? 1 : 0) != 0;
      if (index + 1 < end && loads_late) {
        LoadUnit(next, free_tile);
      }
      if (!any_bad) {
        Store(unit);
      }
      unit = next;
    }
  }

 private:
  __device__ static constexpr HeadRecord Layout() { return {kDim, true, kTilted}; }

  __device__ __forceinline__ void LoadUnit(const DemoteUnit& unit, uint32_t tile) {
    LoadRowsAsync<kDim, kWarps>(shared_.tiles[tile], unit.first_row(params_),
                                unit.rows(params_).token_stride, warp_, lane_);
    CommitCopies();
  }

  // Parameters of another head, or of its V after its K.
  __device__ __forceinline__ void TakeHead(const DemoteUnit& unit) {
    record_ = unit.record(params_, Layout());
    const auto* scalars = reinterpret_cast<const HeadScalars*>(record_ + Layout().scalars());
    clip_from_top_ = static_cast<int>(scalars->clip_from_top[unit.is_value ? 1 : 0]);
    refit_ = {.row_sums = nullptr,
              .num_parts = kWarps,
              .readers = record_ + Layout().readers(),
              .loss_unit = scalars->loss_unit,
              .ones2 = scalars->ones_in_metric,
              .mean_sum = scalars->query_mean_sum,
              .ones_unit = scalars->ones_unit,
              .mean_unit = scalars->mean_unit};
    const auto* from = reinterpret_cast<const uint4*>(record_ + Layout().diagonal());
    auto* to = reinterpret_cast<uint4*>(shared_.diagonal);
    for (int i = static_cast<int>(threadIdx.x); i < kDim * 2; i += kThreads) {
      to[i] = from[i];
    }
  }

  // From the first tile to the second. Registers are short: the matrix comes from the cache each
  // time.
  __device__ __forceinline__ void Rotate(const DemoteUnit& unit) {
    RotationColumns<kDim, kWarps> columns;
    columns.Load(record_ + Layout().rotation(unit.is_value, kRotateUpper), warp_, lane_);
    const auto* shift =
        reinterpret_cast<const float*>(record_ + Layout().upper_shift(unit.is_value));
    RotatePageRows<kDim, kWarps>(shared_.tiles[0], columns, shift, shared_.tiles[1], warp_, lane_);
    __syncthreads();
  }

  // Both return the lane's first row that is not finite, kPageTokens if all are.

  __device__ __forceinline__ int RoundValues(const std::byte* tile) {
    if (warp_ >= kRoundingWarps) {
      return kPageTokens;
    }
    RowPairs<kDim> rows;
    rows.Load(tile + kRowsOfWarp * warp_ * int{Tile::kStride}, lane_);
    const NearestRows nearest = FindLevels(rows, clip_from_top_, lane_);
    shared_.part.SetMeta(nearest, warp_, lane_);
    shared_.part.values.Pack(rows, nearest.bounds, warp_, lane_);
    return nearest.is_finite ? int{kPageTokens} : NearestRows::TokenOf(warp_, lane_);
  }

  // Of a page's rows each of kAwareWarps has sixteen.
  __device__ __forceinline__ int RoundKeys(std::byte* rows, std::byte* whitened) {
    const int first_token = kRowsOfWarp * warp_;
    int bad_token = kPageTokens;
    OpenRow open = {};
    if (warp_ < kAwareWarps) {
      open = OpenRows<kDim>(rows, first_token, lane_, bad_token);
    }
    if constexpr (kTilted) {
      RotationColumns<kDim, kWarps> matrix;
      matrix.Load(record_ + Layout().whitening(), warp_, lane_);
      const auto* vectors = reinterpret_cast<const float*>(record_ + Layout().whitened_vectors());
      __syncthreads();
      WhitenPageRows<kDim, kWarps>(rows, matrix, vectors, whitened,
                                   shared_.sums.row_sums + warp_ * int{kPageTokens}, warp_, lane_);
      __syncthreads();
      refit_.whitened = whitened;
      refit_.row_sums = shared_.sums.row_sums;
    }
    if (warp_ < kAwareWarps) {
      RoundAttentionAware<kDim, kTilted>(rows, shared_.diagonal, record_ + Layout().feedback(),
                                         refit_, open, first_token, shared_.scratch[warp_],
                                         shared_.key_words, shared_.key_meta, lane_);
    }
    return bad_token;
  }

  __device__ __forceinline__ void Store(const DemoteUnit& unit) {
    constexpr Int2HeadBlock kFormat{kDim, kDim};
    std::byte* block = unit.block(params_);
    if (unit.is_value) {
      shared_.part.template StoreValues<kThreads>(block);
    } else {
      StoreKeyWords<kDim, kThreads>(shared_.key_words, block + kFormat.key_codes_offset());
      StoreMeta(shared_.key_meta, block + kFormat.key_meta_offset());
    }
  }

  const DemotePagesParams& params_;
  Shared& shared_;
  const int warp_;
  const int lane_;
  const std::byte* record_ = nullptr;
  int clip_from_top_ = 0;
  RefitOperands refit_;
};

template <int kDim>
inline constexpr uint32_t kDemoteAwareBlocks = kDim == 64    ? 3
                                               : kDim == 128 ? 2
                                                             : 1;

template <int kDim, bool kTilted>
__global__ __launch_bounds__(
    32 * RotateByWarps<kDim>::kWarps,
    kDemoteAwareBlocks<kDim>) void DemoteAwareKernel(const __grid_constant__ DemotePagesParams
                                                         params) {
  constexpr uint32_t kKeyCost = 4;  // About as much as four pages of values.
  extern __shared__ __align__(16) std::byte memory[];
  auto& shared = *reinterpret_cast<DemoteAwareShared<kDim, kTilted>*>(memory);
  const uint32_t begin = FirstUnitOf(params, blockIdx.x, kKeyCost);
  const uint32_t end = FirstUnitOf(params, blockIdx.x + 1, kKeyCost);
  DemoteAwareBlock<kDim, kTilted>(params, shared).Run(begin, end);
}

}  // namespace crumb::gpu
