// SPDX-License-Identifier: Apache-2.0
//
// Demotion of pages: load 64 rows of K or V, rotate, round to two bits, pack, store.
//
// A row of head_dim 128 is 256 bytes in and 36 out: at an H200's copy bandwidth of 4.3 TB/s, 14.7
// million rows a millisecond. Rotation is 2 d^2 operations a row, rounding about twenty
// instructions a pair of elements; either takes most of that time, so they run side by side, in
// several blocks a multiprocessor.
//
// grid = [blocks], each a contiguous share of the units (layer, head, K or V, page), pages fastest:
// a warp keeps its columns of the rotation in registers while the head stays the same. The next
// unit's rows arrive while this one's are rounded.
#pragma once

#include <cstdint>
#include <type_traits>

#include "crumb/cuda/demote_pages.h"
#include "cuda/kernels/round_aware.cuh"

namespace crumb::gpu {

template <int kDim>
inline constexpr int kDemoteWarps = kDim == 256 ? 8 : 4;
// Rounding with feedback takes much shared memory a warp: at 256, four of the eight do it.
inline constexpr int kAwareWarps = 4;

enum class KeyRounding {
  kToNearest,  // oscar-int2
  kAware,      // oscar-int2-aware: with feedback.
  kTilted,     // oscar-int2-tilted: and refitted.
};

template <int kDim, KeyRounding kKeys>
struct DemoteShared {
  using Tile = PageTile<kDim>;
  struct Empty {};
  struct Aware {
    AwareScratch<kDim> scratch[kAwareWarps];
    alignas(16) std::byte diagonal[kDim / 16 * HeadRecord::kDiagonalBytes];
  };
  struct Tilted : Aware {
    float4 row_sums[kDemoteWarps<kDim> * kPageTokens];
  };
  using ForKeys =
      std::conditional_t<kKeys == KeyRounding::kTilted,
                         Tilted,
                         std::conditional_t<kKeys == KeyRounding::kAware, Aware, Empty>>;

  alignas(16) std::byte tiles[2][Tile::kBytes];
  alignas(16) uint32_t row_words[kPageTokens * Tile::kWordStride];
  alignas(16) __half2 meta[kPageTokens];
  // The first row that is not finite, kPageTokens if all are; units take turns with the two.
  int bad_token[2];
  [[no_unique_address]] ForKeys keys;
};

// Unit `index` of a launch.
struct DemoteUnit {
  uint32_t page;
  bool is_value;
  uint32_t head;   // Counted from params.first_head.
  uint32_t layer;  // Counted from params.first_layer.

  __device__ __forceinline__ DemoteUnit(const DemotePagesParams& params, uint32_t index)
      : page(index % params.num_pages) {
    const uint32_t pair = index / params.num_pages;
    is_value = pair % 2 != 0;
    head = pair / 2 % params.num_heads;
    layer = pair / 2 / params.num_heads;
  }

  __device__ __forceinline__ const DeviceRows& rows(const DemotePagesParams& params) const {
    return is_value ? params.values : params.keys;
  }
  __device__ __forceinline__ const std::byte* first_row(const DemotePagesParams& params) const {
    const DeviceRows& from = rows(params);
    return from.pages[page] + from.offset + layer * from.layer_stride + head * from.head_stride;
  }
  __device__ __forceinline__ std::byte* block(const DemotePagesParams& params) const {
    const DeviceBlocks& to = params.int2;
    return to.pages[page] + to.offset + layer * to.layer_stride + head * to.head_stride;
  }
  // In the order in which a reader would look: pages, layers, heads, K before V, tokens.
  __device__ __forceinline__ uint64_t PositionOf(const DemotePagesParams& params, int token) const {
    const uint64_t part =
        ((uint64_t{page} * params.num_layers + layer) * params.num_heads + head) * 2;
    return (part + (is_value ? 1 : 0)) * kPageTokens + static_cast<uint32_t>(token);
  }
};

template <int kDim, KeyRounding kKeys>
class DemoteBlock {
 public:
  static constexpr int kWarps = kDemoteWarps<kDim>;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr bool kAware = kKeys != KeyRounding::kToNearest;
  static constexpr bool kTilted = kKeys == KeyRounding::kTilted;
  using Shared = DemoteShared<kDim, kKeys>;
  using Tile = PageTile<kDim>;

  __device__ __forceinline__ DemoteBlock(const DemotePagesParams& params, Shared& shared)
      : params_(params),
        shared_(shared),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ void Run(uint32_t begin, uint32_t end) {
    if (begin < end) {
      LoadUnit(begin, 0);
    }
    uint32_t pair = ~0u;
    for (uint32_t index = begin; index < end; ++index) {
      const DemoteUnit unit(params_, index);
      if (index / params_.num_pages != pair) {
        pair = index / params_.num_pages;
        TakeHead(unit);
      }
      bad_token_ = &shared_.bad_token[index % 2];
      if (threadIdx.x == 0) {
        *bad_token_ = kPageTokens;
      }
      WaitForCopies<0>();
      __syncthreads();
      const uint32_t current = params_.rows_are_rotated ? (index - begin) % 2 : 1;
      if (!params_.rows_are_rotated) {
        Rotate(unit);
      }
      // Whitened rows take the place of the next ones.
      const uint32_t next = params_.rows_are_rotated ? 1 - current : 0;
      const bool loads_late = kTilted && !unit.is_value;
      if (index + 1 < end && !loads_late) {
        LoadUnit(index + 1, next);
      }
      Round(unit, shared_.tiles[current], shared_.tiles[next]);
      __syncthreads();
      if (index + 1 < end && loads_late) {
        LoadUnit(index + 1, next);
      }
      Store(unit);
    }
  }

 private:
  __device__ static constexpr HeadRecord Layout() { return {kDim, kAware, kTilted}; }

  __device__ __forceinline__ void LoadUnit(uint32_t index, uint32_t tile) {
    const DemoteUnit unit(params_, index);
    LoadRowsAsync<kDim, kThreads>(shared_.tiles[tile], unit.first_row(params_),
                                  unit.rows(params_).token_stride);
    CommitCopies();
  }

  // Parameters of another head, or of its V after its K.
  __device__ __forceinline__ void TakeHead(const DemoteUnit& unit) {
    const DeviceHeads& heads = params_.heads;
    record_ = heads.records + (size_t{params_.first_layer + unit.layer} * heads.num_kv_heads +
                               params_.first_head + unit.head) *
                                  Layout().bytes();
    const auto* scalars = reinterpret_cast<const HeadScalars*>(record_ + Layout().scalars());
    clip_from_top_ = static_cast<int>(scalars->clip_from_top[unit.is_value ? 1 : 0]);
    if constexpr (kAware) {
      refit_ = {.row_sums = nullptr,
                .num_parts = kWarps,
                .readers = record_ + Layout().readers(),
                .loss_unit = scalars->loss_unit,
                .ones2 = scalars->ones_in_metric,
                .mean_sum = scalars->query_mean_sum,
                .ones_unit = scalars->ones_unit,
                .mean_unit = scalars->mean_unit};
    }
    shift_ = reinterpret_cast<const float*>(record_ + Layout().upper_shift(unit.is_value));
    if (!params_.rows_are_rotated && !kAware) {
      rotation_.Load(record_ + Layout().rotation(unit.is_value, kRotateUpper), warp_, lane_);
    }
    if constexpr (kAware) {
      const auto* from = reinterpret_cast<const uint4*>(record_ + Layout().diagonal());
      auto* to = reinterpret_cast<uint4*>(shared_.keys.diagonal);
      for (int i = static_cast<int>(threadIdx.x); i < kDim * 2; i += kThreads) {
        to[i] = from[i];
      }
    }
  }

  // From the first tile to the second.
  __device__ __forceinline__ void Rotate(const DemoteUnit& unit) {
    if constexpr (kAware) {  // Registers are short: the columns come from the cache each time.
      RotationColumns<kDim, kWarps> rotation;
      rotation.Load(record_ + Layout().rotation(unit.is_value, kRotateUpper), warp_, lane_);
      RotatePageRows<kDim, kWarps>(shared_.tiles[0], rotation, shift_, shared_.tiles[1], warp_,
                                   lane_);
    } else {
      RotatePageRows<kDim, kWarps>(shared_.tiles[0], rotation_, shift_, shared_.tiles[1], warp_,
                                   lane_);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void Round(const DemoteUnit& unit,
                                        std::byte* rows,
                                        std::byte* whitened) {
    if constexpr (kAware) {
      if (!unit.is_value) {
        RoundKeys(rows, whitened);
        return;
      }
    }
#pragma unroll 1
    for (int token = 8 * warp_; token < int{kPageTokens}; token += 8 * kWarps) {
      Note(
          RoundToNearest<kDim>(rows, clip_from_top_, token, shared_.row_words, shared_.meta, lane_),
          token);
    }
  }

  // With feedback; of a page's rows each of kAwareWarps has sixteen.
  __device__ __forceinline__ void RoundKeys(std::byte* rows, std::byte* whitened) {
    const int first_token = kRowsOfWarp * warp_;
    OpenRow open = {};
    if (warp_ < kAwareWarps) {
      int bad_token = kPageTokens;
      open = OpenRows<kDim>(rows, first_token, lane_, bad_token);
      if (bad_token < int{kPageTokens}) {
        atomicMin(bad_token_, bad_token);
      }
    }
    if constexpr (kTilted) {
      RotationColumns<kDim, kWarps> matrix;
      matrix.Load(record_ + Layout().whitening(), warp_, lane_);
      const auto* vectors = reinterpret_cast<const float*>(record_ + Layout().whitened_vectors());
      __syncthreads();
      WhitenPageRows<kDim, kWarps>(rows, matrix, vectors, whitened,
                                   shared_.keys.row_sums + warp_ * int{kPageTokens}, warp_, lane_);
      __syncthreads();
      refit_.whitened = whitened;
      refit_.row_sums = shared_.keys.row_sums;
    }
    if (warp_ < kAwareWarps) {
      RoundAttentionAware<kDim, kTilted>(rows, shared_.keys.diagonal, record_ + Layout().feedback(),
                                         refit_, open, first_token, shared_.keys.scratch[warp_],
                                         shared_.row_words, shared_.meta, lane_);
    }
  }

  __device__ __forceinline__ void Note(bool is_finite, int first_token) {
    if (!is_finite) {
      atomicMin(bad_token_, first_token + lane_ % 8);
    }
  }

  __device__ __forceinline__ void Store(const DemoteUnit& unit) {
    if (*bad_token_ < int{kPageTokens}) {
      if (threadIdx.x == 0) {
        // The finding is the largest of complements: zero is none, and the first position wins.
        uint64_t* finding = params_.finding + (params_.has_finding_per_page ? unit.page : 0);
        atomicMax(reinterpret_cast<unsigned long long*>(finding),
                  static_cast<unsigned long long>(~unit.PositionOf(params_, *bad_token_)));
      }
      return;
    }
    StorePart<kDim, kThreads>(shared_.row_words, shared_.meta, unit.is_value, unit.block(params_));
  }

  const DemotePagesParams& params_;
  Shared& shared_;
  const int warp_;
  const int lane_;
  const std::byte* record_ = nullptr;
  const float* shift_ = nullptr;
  int clip_from_top_ = 0;
  RefitOperands refit_;
  int* bad_token_ = nullptr;
  RotationColumns<kDim, kWarps> rotation_;
};

template <int kDim, KeyRounding kKeys>
inline constexpr int kDemoteBlocks = kKeys != KeyRounding::kToNearest ? (kDim == 64    ? 3
                                                                         : kDim == 128 ? 2
                                                                                       : 1)
                                                                      : (kDim == 256 ? 1 : 4);

// Where a block's share begins; the one after the last begins where all units end. Shares are of
// equal cost: a page of keys that are rounded with feedback costs about as much as four of values.
template <KeyRounding kKeys>
__device__ __forceinline__ uint32_t FirstUnitOf(const DemotePagesParams& params, uint32_t block) {
  constexpr uint32_t kKeyCost = kKeys == KeyRounding::kToNearest ? 1 : 4;
  const uint64_t keys = uint64_t{params.num_pages} * kKeyCost;
  const uint64_t head = keys + params.num_pages;
  const uint64_t cost = head * params.num_heads * params.num_layers * block / gridDim.x;
  const uint64_t rest = cost % head;
  const uint64_t of_head = rest < keys ? rest / kKeyCost : params.num_pages + rest - keys;
  return static_cast<uint32_t>(cost / head * 2 * params.num_pages + of_head);
}

template <int kDim, KeyRounding kKeys>
__global__
__launch_bounds__(32 * kDemoteWarps<kDim>, (kDemoteBlocks<kDim, kKeys>)) void DemoteKernel(
    const __grid_constant__ DemotePagesParams params) {
  extern __shared__ __align__(16) std::byte memory[];
  auto& shared = *reinterpret_cast<DemoteShared<kDim, kKeys>*>(memory);
  const uint32_t begin = FirstUnitOf<kKeys>(params, blockIdx.x);
  const uint32_t end = FirstUnitOf<kKeys>(params, blockIdx.x + 1);
  DemoteBlock<kDim, kKeys>(params, shared).Run(begin, end);
}

}  // namespace crumb::gpu
