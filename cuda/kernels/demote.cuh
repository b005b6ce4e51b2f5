// SPDX-License-Identifier: Apache-2.0
//
// Demotion of pages, oscar-int2, and of V's part under any codec: load 64 rows of K or V, rotate,
// round to two bits, pack, store.
//
// A row of head_dim 128 is 256 bytes in and 36 out: at an H200's copy bandwidth of 4.1 TB/s 14
// million rows a millisecond, in which all schedulers can issue 66 instructions a row. Rounding
// takes more, so instructions are what counts. Each of four warps has sixteen rows of a unit in
// registers from their load to the page's words (rotate_rows.cuh, round_nearest.cuh,
// page_words.cuh), with one barrier a unit, when all its codes are there.
//
// The next unit's rows arrive while this one's are rounded; several blocks a multiprocessor, so
// that products of one run beside the rounding of others.
#pragma once

#include <cstdint>

#include "cuda/kernels/demote_unit.cuh"
#include "cuda/kernels/page_words.cuh"
#include "cuda/kernels/rotate_rows.cuh"
#include "cuda/kernels/round_deviation.cuh"

namespace crumb::gpu {

inline constexpr int kRoundingWarps = static_cast<int>(kPageTokens) / kRowsOfWarp;

// Codes and (scale, min) pairs of a unit on their way to the page.
template <int kDim>
struct DemotedPart {
  ValuePlanes<kDim> values;
  alignas(16) __half2 meta[kPageTokens];

  __device__ __forceinline__ void SetMeta(const NearestRows& rows, int warp, int lane) {
    if (lane % 4 < 2) {
      const auto token = static_cast<uint32_t>(NearestRows::TokenOf(warp, lane));
      meta[Int2HeadBlock::MetaIndex(token)] = __floats2half2_rn(rows.levels.scale, rows.levels.min);
    }
  }
  // V's part of a head block.
  template <int kThreads>
  __device__ __forceinline__ void StoreValues(std::byte* block) const {
    constexpr Int2HeadBlock kFormat{kDim, kDim};
    values.template Store<kThreads>(block + kFormat.value_codes_offset());
    StoreMeta(meta, block + kFormat.value_meta_offset(), static_cast<int>(threadIdx.x));
  }
};

template <int kDim, typename Rotation>
struct DemoteShared {
  alignas(16) std::byte tiles[Rotation::kTiles][PageTile<kDim>::kBytes];
  DemotedPart<kDim> parts[2];  // Units take turns.
  typename Rotation::Shared rotation;
};

// kByDeviation: some head is rounded so (round_deviation.cuh); a form of its own, as both need more
// registers than one.
template <int kDim, typename Rotation, bool kByDeviation>
class DemoteBlock {
 public:
  static constexpr int kWarps = Rotation::kWarps;
  static constexpr int kThreads = 32 * kWarps;
  using Shared = DemoteShared<kDim, Rotation>;

  __device__ __forceinline__ DemoteBlock(const DemotePagesParams& params,
                                         const UnitLine& line,
                                         Shared& shared)
      : params_(params),
        line_(line),
        shared_(shared),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ void Run(uint32_t begin, uint32_t end) {
    if (begin == end) {
      return;
    }
    DemoteUnit unit(line_, begin);
    FindRows(unit);
    FindNextPage(unit);
    LoadUnit(0);
    TakeHead(unit);
    for (uint32_t index = begin; index < end; ++index) {
      DemoteUnit next = unit;
      const bool same_head = next.Advance(line_);
      if (same_head) {
        source_ = next_source_;
      } else {
        FindRows(next);
      }
      RowPairs<kDim> rows;
      WaitForCopies<0>();
      rotation_.TakeRows(shared_.tiles, shared_.rotation, params_.rows_are_rotated, index - begin,
                         warp_, lane_, rows, [&](uint32_t tile) {
                           if (index + 1 < end) {
                             LoadUnit(tile);
                           }
                         });
      FindNextPage(next);  // Early, but not before products, which would wait for it.
      Round(unit, rows, shared_.parts[index % 2]);
      unit = next;
      if (!same_head && index + 1 < end) {
        TakeHead(unit);
      }
    }
  }

 private:
  // What it reads of a record lies where any codec has it.
  __device__ static constexpr HeadRecord Layout() { return {kDim, false, false}; }

  static constexpr int kRowsOfLoad = int{kPageTokens} / kWarps;  // A warp's.

  // Where units have their rows, from this one on.
  __device__ __forceinline__ void FindRows(const DemoteUnit& unit) {
    const DeviceRows& rows = unit.rows(params_);
    sources_ = rows.pages;
    source_ = sources_[unit.page];
    token_stride_ = rows.token_stride;
    source_offset_ = unit.FirstRowOffset(rows) + warp_ * kRowsOfLoad * rows.token_stride;
  }
  // The page of the unit after this one, if it is of the same head.
  __device__ __forceinline__ void FindNextPage(const DemoteUnit& unit) {
    next_source_ = sources_[min(unit.page + 1, line_.num_pages - 1)];
  }
  __device__ __forceinline__ void LoadUnit(uint32_t tile) {
    std::byte* to = shared_.tiles[tile] + warp_ * kRowsOfLoad * int{PageTile<kDim>::kStride};
    if (source_ != nullptr) {
      LoadRowsAsync<kDim, kRowsOfLoad>(to, source_ + source_offset_, token_stride_, lane_);
    } else {
      FillWithNan<kDim, kRowsOfLoad>(to, lane_);
    }
    CommitCopies();
  }

  // Parameters of another head, or of its V after its K. All warps have multiplied by the matrix of
  // the one before.
  __device__ __forceinline__ void TakeHead(const DemoteUnit& unit) {
    const std::byte* record = unit.record(params_);
    block_offset_ = unit.BlockOffset(params_.int2);
    const auto* scalars = reinterpret_cast<const HeadScalars*>(record + Layout().scalars());
    clip_from_top_ = static_cast<int>(scalars->clip_from_top[unit.is_value ? 1 : 0]);
    if (!params_.rows_are_rotated) {
      rotation_.TakeMatrix(record, Layout(), unit.is_value, shared_.rotation, warp_, lane_);
    }
  }

  __device__ __forceinline__ void Round(const DemoteUnit& unit,
                                        const RowPairs<kDim>& rows,
                                        DemotedPart<kDim>& part) {
    constexpr Int2HeadBlock kFormat{kDim, kDim};
    std::byte* const target = unit.target(params_);  // Read early, as that takes a while.
    bool is_bad = false;
    KeyWords<kDim> keys;
    if (kWarps == kRoundingWarps || warp_ < kRoundingWarps) {
      const NearestRows nearest = FindRowLevels(rows);
      part.SetMeta(nearest, warp_, lane_);
      if (unit.is_value) {
        part.values.Pack(rows, nearest.bounds, warp_, lane_);
      } else {
        keys.Pack(rows, nearest.bounds, lane_);
      }
      if (!nearest.is_finite) {
        is_bad = true;
        unit.Refuse(params_, NearestRows::TokenOf(warp_, lane_));
      }
    }
    if (__syncthreads_or(is_bad ? 1 : 0) != 0) {
      return;
    }
    if (target == nullptr) {
      unit.ReportNullPage(params_);
      return;
    }
    std::byte* block = target + block_offset_;
    if (unit.is_value) {
      part.template StoreValues<kThreads>(block);
    } else {
      if (kWarps == kRoundingWarps || warp_ < kRoundingWarps) {
        keys.Store(block + kFormat.key_codes_offset(), warp_, lane_);
      }
      StoreMeta(part.meta, block + kFormat.key_meta_offset(), static_cast<int>(threadIdx.x));
    }
  }

  __device__ __forceinline__ NearestRows FindRowLevels(const RowPairs<kDim>& rows) const {
    if constexpr (kByDeviation) {
      if (clip_from_top_ == static_cast<int>(HeadScalars::kByDeviation)) {
        return FindLevelsByDeviation(rows, lane_);
      }
    }
    return FindLevels(rows, clip_from_top_, lane_);
  }

  const DemotePagesParams& params_;
  const UnitLine& line_;
  Shared& shared_;
  const int warp_;
  const int lane_;
  const std::byte* const* sources_ = nullptr;
  const std::byte* source_ = nullptr;  // The page of the unit to be loaded.
  const std::byte* next_source_ = nullptr;
  size_t token_stride_ = 0;
  size_t source_offset_ = 0;  // Of the warp's first row in a page.
  size_t block_offset_ = 0;   // Of the head block in a page.
  int clip_from_top_ = 0;
  Rotation rotation_;
};

template <int kDim, typename Rotation, bool kByDeviation>
__global__ __launch_bounds__(32 * Rotation::kWarps, Rotation::kBlocks) void DemoteKernel(
    const __grid_constant__ DemotePagesParams params, const __grid_constant__ UnitLine line) {
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<DemoteShared<kDim, Rotation>*>(memory);
  const uint32_t num_units = line.num_units(params.num_layers);
  DemoteBlock<kDim, Rotation, kByDeviation>(params, line, shared)
      .Run(FirstUnitOf(line, num_units, blockIdx.x), FirstUnitOf(line, num_units, blockIdx.x + 1));
  if (line.parts == PageParts::kValues) {
    WaitForEarlierWork();  // The keys' launch: what comes after this one comes after that too.
  }
}

}  // namespace crumb::gpu
