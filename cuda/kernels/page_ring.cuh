// SPDX-License-Identifier: Apache-2.0
//
// A warp's ring of shared memory that pages stream through: each stage holds one unit of work, an
// INT2 head block or a tile of BF16 rows, and both take about as many bytes. Compute capability 9.0
// fills a stage by the copy engine, 8.x by 16-byte asynchronous copies; the rest is the same.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/kernels/ptx.cuh"
#include "proto/page/page_format.h"

namespace crumb::gpu {

inline constexpr int kTileRows = 8;       // Tokens of a tile of BF16 rows.
inline constexpr int kRowsOfInt2 = -1;    // Fill::rows of an INT2 head block.
inline constexpr int kRowsOfNothing = 0;  // Of a page that is not there.

template <int kHeadDim>
struct StageLayout {
  static constexpr Int2HeadBlock kInt2{kHeadDim, kHeadDim};
  static constexpr uint32_t kBytes = static_cast<uint32_t>(kInt2.bytes());
  // Rows of K, then of V, apart by 16 bytes more than they have: ldmatrix then meets no bank twice.
  static constexpr uint32_t kRowBytes = 2 * kHeadDim;
  static constexpr uint32_t kRowStride = kRowBytes + 16;
  static constexpr uint32_t kValuesOffset = kTileRows * kRowStride;
  static_assert(2 * kValuesOffset <= kBytes, "a tile must fit where an INT2 head block fits");
  static_assert(kBytes % 128 == 0, "stages must keep the alignment of the copy engine");
};

// Where a unit's bytes come from. `base` is as loaded from a page table, and not looked at before
// the copy: the load may still be on its way.
struct Fill {
  const std::byte* base = nullptr;
  uint64_t offset = 0;
  int rows = kRowsOfNothing;
};

template <int kHeadDim>
class WarpRing {
 public:
  using Layout = StageLayout<kHeadDim>;
  static constexpr uint32_t kBarrierArrivals =
#if __CUDA_ARCH__ >= 900
      1;
#else
      32;
#endif

  // `stages` 128-byte aligned; `barriers` and `rows` have one entry a stage. All of the warp's own.
  __device__ WarpRing(std::byte* stages, uint64_t* barriers, int* rows, int num_stages, int lane)
      : stages_(stages), barriers_(barriers), rows_(rows), num_stages_(num_stages), lane_(lane) {
    for (int i = lane; i < num_stages; i += 32) {
      BarrierInit(&barriers[i], kBarrierArrivals);
    }
    BarrierInitFence();
    __syncwarp();
  }

  // Starts to fill the next stage, which must be free. False: the page was null, and its stage
  // holds kRowsOfNothing.
  __device__ __forceinline__ bool Push(const Fill& fill) {
    std::byte* stage = stages_ + write_ * Layout::kBytes;
    uint64_t* barrier = &barriers_[write_];
    const int rows = fill.base == nullptr ? kRowsOfNothing : fill.rows;
    const std::byte* source = fill.base + fill.offset;
    if (lane_ == 0) {
      rows_[write_] = rows;
    }
    Copy(stage, source, rows, barrier);
    write_ = write_ + 1 == num_stages_ ? 0 : write_ + 1;
    return rows != kRowsOfNothing;
  }

  // Waits for the oldest stage and says what is in it.
  __device__ __forceinline__ const std::byte* Front(int* rows) {
    BarrierWait(&barriers_[read_], parity_);
    *rows = rows_[read_];
    return stages_ + read_ * Layout::kBytes;
  }
  // The oldest stage is free again once all lanes are done with it.
  __device__ __forceinline__ void Pop() {
    __syncwarp();
    if (++read_ == num_stages_) {
      read_ = 0;
      parity_ ^= 1;
    }
  }

 private:
#if __CUDA_ARCH__ >= 900
  __device__ __forceinline__ void Copy(std::byte* stage,
                                       const std::byte* source,
                                       int rows,
                                       uint64_t* barrier) {
    if (rows == kRowsOfInt2) {
      if (lane_ == 0) {
        BarrierArriveExpect(barrier, Layout::kBytes);
        BulkCopy(stage, source, Layout::kBytes, barrier);
      }
      return;
    }
    if (lane_ == 0) {
      BarrierArriveExpect(barrier, static_cast<uint32_t>(rows) * 2 * Layout::kRowBytes);
    }
    __syncwarp();
    const int row = lane_ % kTileRows;
    const int is_value = lane_ / kTileRows;
    if (row < rows && is_value < 2) {
      BulkCopy(stage + is_value * Layout::kValuesOffset + row * Layout::kRowStride,
               source + (is_value * kPageTokens + row) * Layout::kRowBytes, Layout::kRowBytes,
               barrier);
    }
  }
#else
  __device__ __forceinline__ void Copy(std::byte* stage,
                                       const std::byte* source,
                                       int rows,
                                       uint64_t* barrier) {
    constexpr int kChunksOfRow = Layout::kRowBytes / 16;
    __syncwarp();  // What lane 0 wrote about the stage is seen before any arrival.
    if (rows == kRowsOfInt2) {
      for (int i = lane_; i < static_cast<int>(Layout::kBytes / 16); i += 32) {
        AsyncCopy16(stage + i * 16, source + i * 16);
      }
    } else {
      for (int i = lane_; i < rows * 2 * kChunksOfRow; i += 32) {
        const int line = i / kChunksOfRow;  // K's rows, then V's.
        const int is_value = line >= rows;
        const int row = is_value ? line - rows : line;
        const int chunk = i % kChunksOfRow;
        AsyncCopy16(
            stage + is_value * Layout::kValuesOffset + row * Layout::kRowStride + chunk * 16,
            source + (is_value * kPageTokens + row) * Layout::kRowBytes + chunk * 16);
      }
    }
    BarrierArriveOnCopies(barrier);
  }
#endif

  std::byte* stages_;
  uint64_t* barriers_;
  int* rows_;
  int num_stages_;
  int lane_;
  int write_ = 0;
  int read_ = 0;
  uint32_t parity_ = 0;
};

}  // namespace crumb::gpu
