// SPDX-License-Identifier: Apache-2.0
//
// Demotion of K's part of pages, oscar-int2-aware and oscar-int2-tilted: rows are rounded with
// feedback (round_aware.cuh). V's part is demote.cuh's.
//
// A group of four warps has two pages of one head at a time, of which each warp has the sixteen
// tokens of one of the page's tiles: 32 rows, one a lane, from their centring to the page's words.
// Where warpgroups multiply, the rows are rotated where they are, and of head_dim 128 two groups of
// a block share their head's matrices. Elsewhere each warp of the only group multiplies all rows by
// its columns, from where errors will be to where the rows are.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/kernels/demote_unit.cuh"
#include "cuda/kernels/page_words.cuh"
#include "cuda/kernels/rotate_rows.cuh"
#include "cuda/kernels/round_aware.cuh"

namespace crumb::gpu {

inline constexpr int kAwareWarps = 4;
inline constexpr int kAwarePages = 2;
inline constexpr int kAwareRows = kAwarePages * int{kPageTokens};

template <int kDim>
struct AwareGroup {
  using Tile = PageTile<kDim>;
  static constexpr int kWarpRowsBytes = 32 * static_cast<int>(Tile::kStride);
  static_assert(sizeof(AwareScratch<kDim>) * kAwareWarps >= kAwareRows * Tile::kStride,
                "rows that are to be rotated may lie where errors will be");

  AwareScratch<kDim> scratch[kAwareWarps];
  alignas(16) std::byte rows[kAwareRows * Tile::kStride];  // [warp, page, 16 tokens].
  uint2 codes[kAwareWarps][kDim / 16 * 32];                // As RangeCodes has them.
  // Units take turns.
  alignas(16) __half2 meta[2][kAwarePages][kPageTokens];
  uint32_t bad_rows[2][kAwareWarps];  // Those that are not finite, a bit each.
};

template <int kDim, bool kWarpgroups>
struct DemoteAwareShared {
  static constexpr int kGroups = kWarpgroups && kDim == 128 ? 2 : 1;
  static constexpr HeadRecord kLayout{kDim, true, false};
  struct Empty {};
  using Rotation = typename RotateByWarpgroup<kDim>::Shared;

  [[no_unique_address]] std::conditional_t<kWarpgroups, Rotation, Empty> rotation;
  AwareGroup<kDim> groups[kGroups];
  alignas(16) std::byte tiles[kLayout.feedback_bytes()];
  alignas(16) std::byte diagonal[kLayout.diagonal_bytes()];
  alignas(4) __half weights[kDim];  // As RefitOperands has them.
};

template <int kDim, bool kTilted, bool kWarpgroups>
class DemoteAwareBlock {
 public:
  using Shared = DemoteAwareShared<kDim, kWarpgroups>;
  using Tile = PageTile<kDim>;
  static constexpr int kGroups = Shared::kGroups;
  static constexpr int kGroupThreads = 32 * kAwareWarps;
  static constexpr int kThreads = kGroupThreads * kGroups;
  static constexpr uint32_t kBlocks = kDim == 64    ? (kTilted ? 3 : 4)  // Of a multiprocessor.
                                      : kDim == 128 ? 2 / kGroups
                                                    : 1;

  __device__ __forceinline__ DemoteAwareBlock(const DemotePagesParams& params,
                                              const UnitLine& line,
                                              Shared& shared)
      : params_(params),
        line_(line),
        shared_(shared),
        group_index_(static_cast<int>(threadIdx.x) / kGroupThreads),
        warp_(static_cast<int>(threadIdx.x) % kGroupThreads / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        group_(shared.groups[group_index_]),
        rows_(group_.rows + warp_ * AwareGroup<kDim>::kWarpRowsBytes) {}

  // Units of two pages. Those of a head go to the groups in turn.
  __device__ __forceinline__ void Run(uint32_t begin, uint32_t end) {
    for (uint32_t first = begin; first < end;) {
      DemoteUnit unit(line_, first);
      const uint32_t end_of_head = min(unit.page + (end - first), line_.num_pages);
      first += end_of_head - unit.page;
      unit.page += static_cast<uint32_t>(group_index_);
      const std::byte* sources[kAwarePages] = {};
      if (unit.page < end_of_head) {
        FindSources(unit, sources);
        LoadRows(unit, sources);
      }
      __syncthreads();  // All warps are done with the head before.
      TakeHead(unit);
      __syncthreads();
      StaggerGroups();
      RoundHead(unit, end_of_head, sources);
    }
  }

 private:
  __device__ static constexpr HeadRecord Layout() { return {kDim, true, kTilted}; }

  __device__ __forceinline__ void GroupBarrier() const {
    if (kGroups == 1 || group_index_ == 0) {
      NamedBarrier<1, kGroupThreads>();
    } else {
      NamedBarrier<2, kGroupThreads>();
    }
  }

  // Groups that go side by side through the same phases wait for the same pipes: the second begins
  // a third of a unit later.
  __device__ __forceinline__ void StaggerGroups() const {
    constexpr uint32_t kNanoseconds = 5000;
    if (kGroups > 1 && group_index_ > 0) {
      __nanosleep(kNanoseconds);
    }
  }

  // The group's units of a head, of which the first is on its way.
  __device__ __forceinline__ void RoundHead(DemoteUnit unit,
                                            uint32_t end,
                                            const std::byte* (&sources)[kAwarePages]) {
    const bool loads_in_place = kWarpgroups || params_.rows_are_rotated;
    while (unit.page < end) {
      DemoteUnit next = unit;
      next.page += kGroups;
      const bool has_next = next.page < end;
      WaitForCopies<0>();
      if (!params_.rows_are_rotated) {
        Rotate();
      }
      if (has_next) {
        FindSources(next, sources);  // Not before products, which would wait for it.
      }
      __syncwarp();
      const OpenRow open = OpenKeyRow<kDim>(rows_ + lane_ * int{Tile::kStride});
      const uint32_t bad_rows = __ballot_sync(kFullWarp, !open.is_finite);
      if (lane_ == 0) {
        group_.bad_rows[turn_][warp_] = bad_rows;
      }
      if (has_next) {
        PrefetchRows(next, sources);
      }
      uint32_t words[kAwarePages][kDim / 32];
      Round(open, words);
      std::byte* targets[kAwarePages];  // Read early, as that takes a while.
      FindTargets(unit, targets);
      if (has_next && loads_in_place) {
        LoadRows(next, sources);
      }
      GroupBarrier();  // Pairs and findings are there; errors are not needed any more.
      if (has_next && !loads_in_place) {
        LoadRows(next, sources);
      }
      Store(unit, targets, words);
      turn_ ^= 1;
      unit = next;
    }
  }

  // A unit's page of the two.
  __device__ __forceinline__ DemoteUnit PageOf(const DemoteUnit& unit, int which) const {
    DemoteUnit page = unit;
    page.page = kAwarePages * unit.page + static_cast<uint32_t>(which);
    return page;
  }
  __device__ __forceinline__ bool IsThere(const DemoteUnit& page) const {
    return page.page < params_.num_pages;
  }
  // Null: the page is not there, or its table has none.
  __device__ __forceinline__ void FindSources(const DemoteUnit& unit,
                                              const std::byte* (&sources)[kAwarePages]) const {
#pragma unroll
    for (int i = 0; i < kAwarePages; ++i) {
      const DemoteUnit page = PageOf(unit, i);
      sources[i] = IsThere(page) ? page.source(params_) : nullptr;
    }
  }
  __device__ __forceinline__ void FindTargets(const DemoteUnit& unit,
                                              std::byte* (&targets)[kAwarePages]) const {
#pragma unroll
    for (int i = 0; i < kAwarePages; ++i) {
      const DemoteUnit page = PageOf(unit, i);
      targets[i] = IsThere(page) ? page.target(params_) : nullptr;
    }
  }
  // The warp's first row of a page.
  __device__ __forceinline__ const std::byte* FirstRow(const DemoteUnit& unit,
                                                       const std::byte* source) const {
    const DeviceRows& rows = unit.rows(params_);
    return source + unit.FirstRowOffset(rows) + kRowsOfWarp * warp_ * rows.token_stride;
  }

  __device__ __forceinline__ void LoadRows(const DemoteUnit& unit,
                                           const std::byte* const (&sources)[kAwarePages]) {
    std::byte* to = rows_;
    if (!kWarpgroups && !params_.rows_are_rotated) {
      to = reinterpret_cast<std::byte*>(group_.scratch) + (rows_ - group_.rows);
    }
#pragma unroll
    for (int i = 0; i < kAwarePages; ++i) {
      std::byte* rows = to + i * kRowsOfWarp * int{Tile::kStride};
      if (sources[i] != nullptr) {
        LoadRowsAsync<kDim, kRowsOfWarp>(rows, FirstRow(unit, sources[i]),
                                         params_.keys.token_stride, lane_);
      } else {
        FillWithNan<kDim, kRowsOfWarp>(rows, lane_);
      }
    }
    CommitCopies();
  }

  // Into the cache that all multiprocessors share; a row a lane.
  __device__ __forceinline__ void PrefetchRows(const DemoteUnit& unit,
                                               const std::byte* const (&sources)[kAwarePages]) {
    const std::byte* source = lane_ < kRowsOfWarp ? sources[0] : sources[1];
    if (source != nullptr) {
      const std::byte* row =
          FirstRow(unit, source) + lane_ % kRowsOfWarp * params_.keys.token_stride;
#pragma unroll
      for (int i = 0; i < int{Tile::kRowBytes}; i += 128) {
        PrefetchToL2(row + i);
      }
    }
  }

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
    if constexpr (kWarpgroups) {
      if (!params_.rows_are_rotated) {
        rotation_.TakeMatrix(record_, Layout(), false, shared_.rotation, warp_, lane_);
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

  __device__ __forceinline__ void Rotate() {
    if constexpr (kWarpgroups) {
      __syncwarp();  // The warp has its rows.
#pragma unroll 1
      for (int i = 0; i < kAwarePages; ++i) {
        std::byte* rows = rows_ + i * kRowsOfWarp * int{Tile::kStride};
        RowPairs<kDim> pairs;
        pairs.Load(rows, lane_);
        rotation_.template Rotate<kDim>(shared_.rotation, lane_, pairs);
        __syncwarp();
        pairs.Store(rows, lane_);
      }
    } else {
      GroupBarrier();
      RotateByColumns();
      GroupBarrier();
    }
  }

  // Registers are short: the matrix comes from the cache each time.
  __device__ __forceinline__ void RotateByColumns() {
    constexpr int kSlices = kDim == 256 ? 8 : 4;
    const auto* shift = reinterpret_cast<const float*>(record_ + Layout().upper_shift(false));
#pragma unroll 1
    for (int slice = warp_; slice < kSlices; slice += kAwareWarps) {
      RotationColumns<kDim, kSlices> columns;
      columns.Load(record_ + Layout().rotation(false, kRotateUpper), slice, lane_);
      RotatePageRows<kDim, kSlices, kAwareRows>(reinterpret_cast<const std::byte*>(group_.scratch),
                                                columns, shift, group_.rows, slice, lane_);
    }
  }

  // The warp's rows, to the lane's words of its tile of each page; their pairs to shared memory.
  __device__ __forceinline__ void Round(const OpenRow& open,
                                        uint32_t (&words)[kAwarePages][kDim / 32]) {
    const FeedbackOperands feedback = {shared_.diagonal, shared_.tiles};
    const RangeCodes codes = {group_.codes[warp_]};
    const RoundedRow rounded = RoundAttentionAware<kDim, kTilted>(
        rows_, feedback, refit_, open, group_.scratch[warp_], codes, lane_);
    const auto token = static_cast<uint32_t>(kRowsOfWarp * warp_ + lane_ % kRowsOfWarp);
    group_.meta[turn_][lane_ / kRowsOfWarp][Int2HeadBlock::MetaIndex(token)] =
        __floats2half2_rn(rounded.levels.scale, rounded.levels.min);
    const uint32_t take_second = __ballot_sync(kFullWarp, rounded.takes_second);
    __syncwarp();  // All codes are there.
#pragma unroll
    for (int i = 0; i < kAwarePages; ++i) {
      codes.template Select<kDim>(i * kRowsOfWarp, take_second, lane_, words[i]);
    }
    __syncwarp();  // The warp is done with its rows and codes.
  }

  __device__ __forceinline__ void Store(const DemoteUnit& unit,
                                        std::byte* const (&targets)[kAwarePages],
                                        const uint32_t (&words)[kAwarePages][kDim / 32]) {
    constexpr Int2HeadBlock kFormat{kDim, kDim};
#pragma unroll
    for (int i = 0; i < kAwarePages; ++i) {
      const DemoteUnit page = PageOf(unit, i);
      if (!IsThere(page)) {
        break;
      }
      const auto bad_rows = [&](int warp) {
        return group_.bad_rows[turn_][warp] >> (i * kRowsOfWarp) & 0xffffu;
      };
      std::byte* const target = targets[i];
      if (target == nullptr || (bad_rows(0) | bad_rows(1) | bad_rows(2) | bad_rows(3)) != 0) {
        Refuse(page, bad_rows(warp_));
        continue;
      }
      std::byte* block = target + page.BlockOffset(params_.int2);
      StoreKeyWords<kDim>(words[i], block + kFormat.key_codes_offset(), warp_, lane_);
      if (warp_ == i) {
        StoreMeta(group_.meta[turn_][i], block + kFormat.key_meta_offset(), lane_);
      }
    }
  }

  // `bad_rows` of the warp's sixteen.
  __device__ __forceinline__ void Refuse(const DemoteUnit& page, uint32_t bad_rows) const {
    if (lane_ != 0) {
      return;
    }
    if (page.target(params_) == nullptr) {
      page.ReportNullPage(params_);
    } else if (bad_rows != 0) {
      page.Refuse(params_, kRowsOfWarp * warp_ + __ffs(static_cast<int>(bad_rows)) - 1);
    }
  }

  const DemotePagesParams& params_;
  const UnitLine& line_;
  Shared& shared_;
  const int group_index_;
  const int warp_;  // Of the group.
  const int lane_;
  AwareGroup<kDim>& group_;
  std::byte* const rows_;  // The warp's.
  int turn_ = 0;
  const std::byte* record_ = nullptr;
  RefitOperands refit_ = {};
  RotateByWarpgroup<kDim> rotation_;
};

// `line` is of units of two pages, of keys. Block: a DemoteAwareBlock.
template <typename Block>
__global__ __launch_bounds__(Block::kThreads, Block::kBlocks) void DemoteAwareKernel(
    const __grid_constant__ DemotePagesParams params, const __grid_constant__ UnitLine line) {
  LetNextLaunchStart();  // The values', which fills multiprocessors that are done with keys.
  extern __shared__ __align__(128) std::byte memory[];
  const uint32_t num_units = line.num_units(params.num_layers);
  Block(params, line, *reinterpret_cast<typename Block::Shared*>(memory))
      .Run(FirstUnitOf(line, num_units, blockIdx.x), FirstUnitOf(line, num_units, blockIdx.x + 1));
}

}  // namespace crumb::gpu
