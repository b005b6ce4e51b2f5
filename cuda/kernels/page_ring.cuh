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

// Where a unit's bytes come from; null: a page that is not there.
struct Fill {
  const std::byte* source = nullptr;
  int rows = kRowsOfNothing;
};

// A stage's barrier, and what the stage holds: Fill::rows.
struct StageState {
  uint64_t barrier;
  int rows;
  int padding;
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

  // `stages` 128-byte aligned, `states` one a stage, at most 32. All of the warp's own.
  __device__ __forceinline__
  WarpRing(std::byte* stages, StageState* states, int num_stages, int lane)
      : stages_(stages), states_(states), num_stages_(num_stages), lane_(lane) {
    if (lane < num_stages) {
      BarrierInit(&states[lane].barrier, kBarrierArrivals);
    }
    BarrierInitFence();
    __syncwarp();
  }

  // For a warp that reads a ring which another warp made and fills.
  __device__ __forceinline__ void SetStages(int num_stages) {
    num_stages_ = num_stages;
  }

  // Starts to fill the next stage, which must be free; of a null source, with kRowsOfNothing.
  __device__ __forceinline__ void Push(const Fill& fill) {
    const int rows = fill.source == nullptr ? kRowsOfNothing : fill.rows;
    StageState* state = &states_[write_];
    if (lane_ == 0) {
      state->rows = rows;
    }
    Copy(stages_ + write_ * Layout::kBytes, fill.source, rows, &state->barrier);
    write_ = write_ + 1 == num_stages_ ? 0 : write_ + 1;
  }

  // Waits for the oldest stage and says what is in it.
  __device__ __forceinline__ const std::byte* Front(int* rows) {
    StageState* state = &states_[read_];
    BarrierWait(&state->barrier, parity_);
    *rows = state->rows;
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
        BulkCopyOnce(stage, source, Layout::kBytes, barrier);
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
  StageState* states_;
  int num_stages_;
  int lane_;
  int write_ = 0;
  int read_ = 0;
  uint32_t parity_ = 0;
};

}  // namespace crumb::gpu
