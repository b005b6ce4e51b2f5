// SPDX-License-Identifier: Apache-2.0
//
// The 64 rows of K or V of one head block in shared memory, as BF16: loaded, rotated, and packed
// into the page format once they are rounded.
#pragma once

#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "cuda/kernels/mma.cuh"
#include "cuda/launch/head_record.h"
#include "proto/page/page_format.h"

namespace crumb::gpu {

inline constexpr int kRowsOfWarp = 16;  // That it rounds at a time.

template <int kDim>
struct PageTile {
  static constexpr uint32_t kRowBytes = 2 * kDim;
  static constexpr uint32_t kStride =
      kRowBytes + 16;  // Eight rows' chunks of 16 then meet no bank twice.
  static constexpr uint32_t kBytes = kPageTokens * kStride;
};

// Starts to copy kRows rows to `to`, rows of a tile, 16 bytes a lane and step; one warp.
template <int kDim, int kRows>
__device__ __forceinline__ void LoadRowsAsync(std::byte* to,
                                              const std::byte* from,
                                              size_t token_stride,
                                              int lane) {
  using Tile = PageTile<kDim>;
  constexpr int kChunks = Tile::kRowBytes / 16;
  constexpr int kStep = 32 / kChunks;  // Rows.
  to += lane / kChunks * int{Tile::kStride} + lane % kChunks * 16;
  from += lane / kChunks * token_stride + lane % kChunks * 16;
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i) {
    CopyAsync16(to + i * kStep * Tile::kStride, from);
    from += kStep * token_stride;
  }
}

// Instead of rows of a page that is null: so they are refused.
template <int kDim, int kRows>
__device__ __forceinline__ void FillWithNan(std::byte* to, int lane) {
  constexpr int kWords = int{PageTile<kDim>::kRowBytes} / 4;
#pragma unroll 1
  for (int i = lane; i < kRows * kWords; i += 32) {
    *reinterpret_cast<uint32_t*>(to + i / kWords * int{PageTile<kDim>::kStride} + i % kWords * 4) =
        0x7fc07fc0u;
  }
}

// A warp's columns of a rotation, held in registers over many pages: B operands of m16n8k16.
template <int kDim, int kWarps>
struct RotationColumns {
  static constexpr int kTiles = kDim / 8 / kWarps;
  static constexpr int kSteps = kDim / 16;
  uint2 b[kTiles][kSteps];

  __device__ __forceinline__ void Load(const std::byte* matrix, int warp, int lane) {
    const auto* tiles = reinterpret_cast<const uint2*>(matrix) + warp * kTiles * kSteps * 32 + lane;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        b[n][k] = tiles[(n * kSteps + k) * 32];
      }
    }
  }
};

// to = from * R + shift of kRows rows, rounded to bf16; all warps, each its columns.
template <int kDim, int kWarps, int kRows = int{kPageTokens}>
__device__ __forceinline__ void RotatePageRows(const std::byte* from,
                                               const RotationColumns<kDim, kWarps>& rotation,
                                               const float* shift,
                                               std::byte* to,
                                               int warp,
                                               int lane) {
  using Tile = PageTile<kDim>;
  using Columns = RotationColumns<kDim, kWarps>;
  const int g = lane / 4;
  const int t = lane % 4;
  const int first_column = warp * Columns::kTiles * 8 + 2 * t;
  float2 start[Columns::kTiles];
#pragma unroll
  for (int n = 0; n < Columns::kTiles; ++n) {
    start[n] = *reinterpret_cast<const float2*>(shift + first_column + 8 * n);
  }
#pragma unroll 1
  for (int row = 0; row < kRows; row += 16) {
    float sums[Columns::kTiles][4];
#pragma unroll
    for (int n = 0; n < Columns::kTiles; ++n) {
      sums[n][0] = sums[n][2] = start[n].x;
      sums[n][1] = sums[n][3] = start[n].y;
    }
    const std::byte* operand = OperandRow(from + row * Tile::kStride, Tile::kStride, lane);
#pragma unroll
    for (int k = 0; k < Columns::kSteps; ++k) {
      uint32_t a[4];
      LoadMatrices(a, operand + k * 32);
#pragma unroll
      for (int n = 0; n < Columns::kTiles; ++n) {
        MmaBf16(sums[n], a, rotation.b[n][k].x, rotation.b[n][k].y);
      }
    }
    std::byte* out = to + (row + g) * Tile::kStride + first_column * 2;
#pragma unroll
    for (int n = 0; n < Columns::kTiles; ++n) {
      *reinterpret_cast<uint32_t*>(out + n * 16) = PackBf16(sums[n][0], sums[n][1]);
      *reinterpret_cast<uint32_t*>(out + 8 * Tile::kStride + n * 16) =
          PackBf16(sums[n][2], sums[n][3]);
    }
  }
}

// Writes the (scale, min) pairs of K or V, which lie in the page's order in `meta`; threads 0
// to 15.
__device__ __forceinline__ void StoreMeta(const __half2* meta, std::byte* to, int thread) {
  if (thread < int{Int2HeadBlock::meta_bytes() / 16}) {
    reinterpret_cast<uint4*>(to)[thread] = reinterpret_cast<const uint4*>(meta)[thread];
  }
}

}  // namespace crumb::gpu
