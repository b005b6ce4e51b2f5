// SPDX-License-Identifier: Apache-2.0
//
// How rows that have been loaded come into the registers of the warps that round them, rotated or
// as they are: two forms, by what multiplies.
//
// A form has kWarps a block, kBlocks a multiprocessor, kTiles of rows in shared memory, and
//   TakeMatrix   the matrix of another head, or of its V; all threads
//   TakeRows     rows that have arrived into `rows`, of warps below four sixteen each; all threads.
//                Calls `load_next` with a tile once that is free, the first before all.
#pragma once

#include <cstdint>

#include "cuda/kernels/round_nearest.cuh"
#include "cuda/kernels/wgmma.cuh"

namespace crumb::gpu {

// By each warp, its columns of all rows, which it keeps in registers as long as the head stays the
// same.
template <int kDim>
class RotateByWarps {
 public:
  static constexpr int kWarps = kDim == 256 ? 8 : 4;
  static constexpr uint32_t kBlocks = kDim == 64 ? 4 : kDim == 128 ? 3 : 1;
  static constexpr uint32_t kTiles = 2;
  struct Shared {};

  __device__ __forceinline__ void TakeMatrix(const std::byte* record,
                                             const HeadRecord& layout,
                                             bool is_value,
                                             Shared& /*shared*/,
                                             int warp,
                                             int lane) {
    columns_.Load(record + layout.rotation(is_value, kRotateUpper), warp, lane);
    shift_ = reinterpret_cast<const float*>(record + layout.upper_shift(is_value));
  }

  template <typename LoadNext>
  __device__ __forceinline__ void TakeRows(std::byte (&tiles)[kTiles][PageTile<kDim>::kBytes],
                                           Shared& /*shared*/,
                                           bool are_rotated,
                                           uint32_t count,
                                           int warp,
                                           int lane,
                                           RowPairs<kDim>& rows,
                                           LoadNext&& load_next) {
    __syncthreads();  // Of all warps.
    const uint32_t current = are_rotated ? count % 2 : 1;
    if (!are_rotated) {
      RotatePageRows<kDim, kWarps>(tiles[0], columns_, shift_, tiles[1], warp, lane);
      __syncthreads();
    }
    load_next(1 - current);
    if (kWarps * kRowsOfWarp == int{kPageTokens} || warp * kRowsOfWarp < int{kPageTokens}) {
      rows.Load(tiles[current] + kRowsOfWarp * warp * int{PageTile<kDim>::kStride}, lane);
    }
  }

 private:
  RotationColumns<kDim, kWarps> columns_;
  const float* shift_ = nullptr;
};

// By the block as one warpgroup, from the registers in which the warp's rows are to those in which
// it rounds them; the matrix is in shared memory. Other warps' rows are of no concern. head_dim 64
// and 128, compute capability 9.0.
template <int kDim>
class RotateByWarpgroup {
 public:
  static constexpr int kWarps = 4;
  static constexpr uint32_t kBlocks = 4;
  static constexpr uint32_t kTiles = 1;
  struct Shared {
    alignas(128) std::byte matrix[kDim * kDim * 2];  // Operand B, in cores of 8 k x 8 columns.
    float2 shift[kDim / 2];                          // Of keys.
  };

  __device__ __forceinline__ void TakeMatrix(const std::byte* record,
                                             const HeadRecord& layout,
                                             bool is_value,
                                             Shared& shared,
                                             int /*warp*/,
                                             int /*lane*/) {
    has_shift_ = !is_value;
    const int thread = ThreadAnew();
    const auto* shift = reinterpret_cast<const float2*>(record + layout.upper_shift(is_value));
    for (int i = thread; i < kDim / 2; i += static_cast<int>(blockDim.x)) {
      shared.shift[i] = shift[i];
    }
    // An operand's two words of a lane are of two cores.
    const auto* from =
        reinterpret_cast<const uint4*>(record + layout.rotation(is_value, kRotateUpper));
#pragma unroll 4
    for (int i = thread; i < kDim * kDim / 8; i += static_cast<int>(blockDim.x)) {
      const uint4 lanes = from[i];
      std::byte* cores = shared.matrix + i / 16 * 256 + i % 16 * 8;
      *reinterpret_cast<uint2*>(cores) = make_uint2(lanes.x, lanes.z);
      *reinterpret_cast<uint2*>(cores + 128) = make_uint2(lanes.y, lanes.w);
    }
    AsyncProxyFence();
    __syncthreads();
  }

  template <typename LoadNext>
  __device__ __forceinline__ void TakeRows(std::byte (&tiles)[kTiles][PageTile<kDim>::kBytes],
                                           Shared& shared,
                                           bool are_rotated,
                                           uint32_t /*count*/,
                                           int warp,
                                           int lane,
                                           RowPairs<kDim>& rows,
                                           LoadNext&& load_next) {
    __syncwarp();
    rows.Load(tiles[0] + kRowsOfWarp * warp * int{PageTile<kDim>::kStride}, lane);
    __syncwarp();  // The warp has them all.
    load_next(0);
    if (!are_rotated) {
      Rotate(shared, lane, rows);
    }
  }

  // Starts to multiply a warp's sixteen rows by kColumns columns, the part's.
  template <int kColumns>
  __device__ __forceinline__ void Multiply(const Shared& shared,
                                           const RowPairs<kDim>& rows,
                                           int part,
                                           float (&sums)[kColumns / 2]) const {
    if constexpr (kHasWarpgroups) {
      const uint64_t matrix = WgmmaDescriptor(shared.matrix, 128, kDim * 16) +
                              static_cast<uint64_t>(part * kColumns / 8 * (kDim * 16 >> 4));
      WgmmaFence();
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
        const uint32_t a[4] = {rows.words[2 * k][0], rows.words[2 * k][1], rows.words[2 * k + 1][0],
                               rows.words[2 * k + 1][1]};
        Wgmma<kColumns, __nv_bfloat16>::template Run<0>(sums, a, matrix + k * (256 >> 4),
                                                        k > 0 ? 1 : 0);
      }
      WgmmaCommit();
    }
  }
  // When that is done: the columns' pairs, to `pairs`.
  template <int kColumns>
  __device__ __forceinline__ void Finish(const Shared& shared,
                                         int part,
                                         int lane,
                                         float (&sums)[kColumns / 2],
                                         uint32_t (&pairs)[kColumns / 8][2]) const {
    WgmmaHold(sums);
    if (has_shift_) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const float2 shift = shared.shift[part * kColumns / 2 + 4 * n + lane % 4];
        sums[4 * n] += shift.x;
        sums[4 * n + 1] += shift.y;
        sums[4 * n + 2] += shift.x;
        sums[4 * n + 3] += shift.y;
      }
    }
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      pairs[n][0] = PackBf16(sums[4 * n], sums[4 * n + 1]);
      pairs[n][1] = PackBf16(sums[4 * n + 2], sums[4 * n + 3]);
    }
  }

  // A warp's sixteen rows, in place. kColumns of the product at a time: the sums of more would take
  // more registers than the rows that they become.
  template <int kColumns = 64>
  __device__ __forceinline__ void Rotate(const Shared& shared,
                                         int lane,
                                         RowPairs<kDim>& rows) const {
    if constexpr (kHasWarpgroups) {
      constexpr int kPairs = kColumns / 8;
      uint32_t pairs[kDim / kColumns][kPairs][2];
#pragma unroll
      for (int part = 0; part < kDim / kColumns; ++part) {
        float sums[kColumns / 2];
        Multiply<kColumns>(shared, rows, part, sums);
        WgmmaWaitAll();
        Finish<kColumns>(shared, part, lane, sums, pairs[part]);
      }
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        rows.words[n][0] = pairs[n / kPairs][n % kPairs][0];
        rows.words[n][1] = pairs[n / kPairs][n % kPairs][1];
      }
    }
  }

 private:
  bool has_shift_ = false;
};

}  // namespace crumb::gpu
