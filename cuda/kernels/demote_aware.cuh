// SPDX-License-Identifier: Apache-2.0
//
// Demotion of K's part of pages, oscar-int2-aware and oscar-int2-tilted: rows are rounded with
// feedback (round_aware.cuh). V's part is demote.cuh's.
//
// A block of four warps has two pages of one head at a time, of which each warp has the sixteen
// tokens of one of the page's tiles: 32 rows, one a lane, from their centring to the page's words.
// Only rotation is shared: each warp multiplies all rows by its columns, from where errors will be
// to where the rows are.
#pragma once

#include <cstdint>

#include "cuda/kernels/demote_unit.cuh"
#include "cuda/kernels/page_words.cuh"
#include "cuda/kernels/round_aware.cuh"

namespace crumb::gpu {

inline constexpr int kAwareWarps = 4;
inline constexpr int kAwarePages = 2;
inline constexpr int kAwareRows = kAwarePages * int{kPageTokens};

template <int kDim>
struct DemoteAwareShared {
  using Tile = PageTile<kDim>;
  static constexpr int kTileRowsBytes = 32 * static_cast<int>(Tile::kStride);  // Of a warp.
  static constexpr HeadRecord kLayout{kDim, true, false};
  static_assert(sizeof(AwareScratch<kDim>) * kAwareWarps >= kAwareRows * Tile::kStride,
                "rows that are to be rotated lie where errors will be");

  AwareScratch<kDim> scratch[kAwareWarps];
  alignas(16) std::byte rows[kAwareRows * Tile::kStride];  // [warp, page, 16 tokens].
  alignas(16) std::byte tiles[kLayout.feedback_bytes()];
  alignas(16) std::byte diagonal[kLayout.diagonal_bytes()];
  uint2 codes[kAwareWarps][kDim / 16 * 32];  // As RangeCodes has them.
  alignas(16) __half2 meta[kAwarePages][kPageTokens];
  alignas(4) __half weights[kDim];  // As RefitOperands has them.
  uint32_t bad_rows[kAwareWarps];   // Those that are not finite, a bit each.
};

template <int kDim, bool kTilted>
class DemoteAwareBlock {
 public:
  static constexpr int kThreads = 32 * kAwareWarps;
  using Shared = DemoteAwareShared<kDim>;
  using Tile = PageTile<kDim>;

  __device__ __forceinline__ DemoteAwareBlock(const DemotePagesParams& params,
                                              const UnitLine& line,
                                              Shared& shared)
      : params_(params),
        line_(line),
        shared_(shared),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        rows_(shared.rows + warp_ * Shared::kTileRowsBytes) {}

  // Units of two pages.
  __device__ __forceinline__ void Run(uint32_t begin, uint32_t end) {
    if (begin == end) {
      return;
    }
    DemoteUnit unit(line_, begin);
    LoadRows(unit);
    bool same_head = false;
    for (uint32_t index = begin; index < end; ++index) {
      if (!same_head) {
        TakeHead(unit);
      }
      WaitForCopies<0>();
      __syncthreads();
      if (!params_.rows_are_rotated) {
        Rotate();
      }
      const OpenRow open = OpenKeyRow<kDim>(rows_ + lane_ * int{Tile::kStride});
      DemoteUnit next = unit;
      same_head = next.Advance(line_);
      const bool has_next = index + 1 < end;
      if (has_next) {
        PrefetchRows(next);
      }
      const uint32_t bad_rows = __ballot_sync(kFullWarp, !open.is_finite);
      if (lane_ == 0) {
        shared_.bad_rows[warp_] = bad_rows;
      }
      uint32_t words[kAwarePages][kDim / 32];
      Round(open, words);
      __syncthreads();  // Rows and errors are not needed any more; pairs and findings are there.
      if (has_next && !params_.rows_are_rotated) {
        LoadRows(next);
      }
      Store(unit, words);
      if (has_next && params_.rows_are_rotated) {
        LoadRows(next);
      }
      unit = next;
    }
  }

 private:
  __device__ static constexpr HeadRecord Layout() { return {kDim, true, kTilted}; }

  // A unit's page of the two, if it is there.
  __device__ __forceinline__ DemoteUnit PageOf(const DemoteUnit& unit, int which) const {
    DemoteUnit page = unit;
    page.page = kAwarePages * unit.page + static_cast<uint32_t>(which);
    return page;
  }
  __device__ __forceinline__ bool IsThere(const DemoteUnit& page) const {
    return page.page < params_.num_pages;
  }
  // The warp's first row of a page.
  __device__ __forceinline__ const std::byte* FirstRow(const DemoteUnit& page) const {
    return page.first_row(params_) + kRowsOfWarp * warp_ * params_.keys.token_stride;
  }

  __device__ __forceinline__ void LoadRows(const DemoteUnit& unit) {
    std::byte* to = params_.rows_are_rotated
                        ? rows_
                        : reinterpret_cast<std::byte*>(shared_.scratch) + (rows_ - shared_.rows);
#pragma unroll
    for (int i = 0; i < kAwarePages; ++i) {
      const DemoteUnit page = PageOf(unit, i);
      if (IsThere(page)) {
        LoadRowsAsync<kDim, kRowsOfWarp>(to + i * kRowsOfWarp * int{Tile::kStride}, FirstRow(page),
                                         params_.keys.token_stride, lane_);
      }
    }
    CommitCopies();
  }

  // Into the cache that all multiprocessors share; a row a lane.
  __device__ __forceinline__ void PrefetchRows(const DemoteUnit& unit) {
    const DemoteUnit page = PageOf(unit, lane_ / kRowsOfWarp);
    if (IsThere(page)) {
      const std::byte* row = FirstRow(page) + lane_ % kRowsOfWarp * params_.keys.token_stride;
#pragma unroll
      for (int i = 0; i < int{Tile::kRowBytes}; i += 128) {
        PrefetchToL2(row + i);
      }
    }
  }

  // Parameters of another head. All warps are done with those of the one before.
  __device__ __forceinline__ void TakeHead(const DemoteUnit& unit) {
    record_ = unit.record(params_);
    const auto* scalars = reinterpret_cast<const HeadScalars*>(record_ + Layout().scalars());
    refit_ = {.whitening = record_ + Layout().whitening(),
              .readers = record_ + Layout().readers(),
              .weights = shared_.weights,
              .loss_unit = scalars->loss_unit,
              .ones2 = scalars->ones_in_metric,
              .mean_sum = scalars->query_mean_sum,
              .ones_unit = scalars->ones_unit,
              .mean_unit = scalars->mean_unit};
    Take(shared_.diagonal, record_ + Layout().diagonal());
    Take(shared_.tiles, record_ + Layout().feedback());
    if constexpr (kTilted) {
      const auto* diagonal = reinterpret_cast<const __half*>(record_ + Layout().diagonal());
      for (int i = static_cast<int>(threadIdx.x); i < kDim; i += kThreads) {
        shared_.weights[i] = diagonal[i * 16 + i % 16];
      }
    }
  }
  template <size_t kBytes>
  __device__ __forceinline__ void Take(std::byte (&to)[kBytes], const std::byte* from) {
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(kBytes / 16); i += kThreads) {
      reinterpret_cast<uint4*>(to)[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
    }
  }

  // Registers are short: the matrix comes from the cache each time.
  __device__ __forceinline__ void Rotate() {
    constexpr int kSlices = kDim == 256 ? 8 : 4;  // Of columns.
    const auto* shift = reinterpret_cast<const float*>(record_ + Layout().upper_shift(false));
#pragma unroll 1
    for (int slice = warp_; slice < kSlices; slice += kAwareWarps) {
      RotationColumns<kDim, kSlices> columns;
      columns.Load(record_ + Layout().rotation(false, kRotateUpper), slice, lane_);
      RotatePageRows<kDim, kSlices, kAwareRows>(reinterpret_cast<const std::byte*>(shared_.scratch),
                                                columns, shift, shared_.rows, slice, lane_);
    }
    __syncthreads();
  }

  // The warp's rows, to the lane's words of its tile of each page; their pairs to shared memory.
  __device__ __forceinline__ void Round(const OpenRow& open,
                                        uint32_t (&words)[kAwarePages][kDim / 32]) {
    const FeedbackOperands feedback = {shared_.diagonal, shared_.tiles};
    const RangeCodes codes = {shared_.codes[warp_]};
    const RoundedRow rounded = RoundAttentionAware<kDim, kTilted>(
        rows_, feedback, refit_, open, shared_.scratch[warp_], codes, lane_);
    const uint32_t token = static_cast<uint32_t>(kRowsOfWarp * warp_ + lane_ % kRowsOfWarp);
    shared_.meta[lane_ / kRowsOfWarp][Int2HeadBlock::MetaIndex(token)] =
        __floats2half2_rn(rounded.levels.scale, rounded.levels.min);
    const uint32_t take_second = __ballot_sync(kFullWarp, rounded.takes_second);
    __syncwarp();  // All codes are there.
#pragma unroll
    for (int i = 0; i < kAwarePages; ++i) {
      codes.template Select<kDim>(i * kRowsOfWarp, take_second, lane_, words[i]);
    }
  }

  __device__ __forceinline__ void Store(const DemoteUnit& unit,
                                        const uint32_t (&words)[kAwarePages][kDim / 32]) {
    constexpr Int2HeadBlock kFormat{kDim, kDim};
#pragma unroll
    for (int i = 0; i < kAwarePages; ++i) {
      const DemoteUnit page = PageOf(unit, i);
      if (!IsThere(page)) {
        break;
      }
      uint32_t bad_rows = 0;
#pragma unroll
      for (int warp = 0; warp < kAwareWarps; ++warp) {
        bad_rows |= shared_.bad_rows[warp] >> (i * kRowsOfWarp) & 0xffffu;
      }
      if (bad_rows != 0) {
        const uint32_t mine = shared_.bad_rows[warp_] >> (i * kRowsOfWarp) & 0xffffu;
        if (mine != 0 && lane_ == 0) {
          page.Report(params_, kRowsOfWarp * warp_ + __ffs(static_cast<int>(mine)) - 1);
        }
        continue;
      }
      std::byte* block = page.block(params_);
      StoreKeyWords<kDim>(words[i], block + kFormat.key_codes_offset(), warp_, lane_);
      StoreMeta(shared_.meta[i], block + kFormat.key_meta_offset());
    }
  }

  const DemotePagesParams& params_;
  const UnitLine& line_;
  Shared& shared_;
  const int warp_;
  const int lane_;
  std::byte* const rows_;  // The warp's.
  const std::byte* record_ = nullptr;
  RefitOperands refit_ = {};
};

// Of a multiprocessor.
template <int kDim, bool kTilted>
inline constexpr uint32_t kDemoteAwareBlocks = kDim == 64    ? (kTilted ? 3 : 4)
                                               : kDim == 128 ? 2
                                                             : 1;

// `line` is of units of two pages, of keys.
template <int kDim, bool kTilted>
__global__
__launch_bounds__(32 * kAwareWarps, (kDemoteAwareBlocks<kDim, kTilted>)) void DemoteAwareKernel(
    const __grid_constant__ DemotePagesParams params, const __grid_constant__ UnitLine line) {
  extern __shared__ __align__(16) std::byte memory[];
  auto& shared = *reinterpret_cast<DemoteAwareShared<kDim>*>(memory);
  const uint32_t num_units = line.num_units(params.num_layers);
  DemoteAwareBlock<kDim, kTilted>(params, line, shared)
      .Run(FirstUnitOf(num_units, blockIdx.x), FirstUnitOf(num_units, blockIdx.x + 1));
}

}  // namespace crumb::gpu
