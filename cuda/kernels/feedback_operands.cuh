// SPDX-License-Identifier: Apache-2.0
//
// A head's feedback factor in shared memory, as operands of m16n8k16: HeadRecord's diagonal and the
// tiles above it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/kernels/ptx.cuh"
#include "cuda/launch/head_record.h"

namespace crumb::gpu {

struct FeedbackOperands {
  const std::byte* diagonal;
  const std::byte* tiles;

  // What block `row` pushes into block `column`, as the operand A that takes errors along the
  // columns.
  __device__ __forceinline__ void LoadForErrors(uint32_t (&a)[4],
                                                int row,
                                                int column,
                                                int lane) const {
    LoadMatrices(a, Tile(row, column) + lane * 16);
  }
  // The same as the two operands B that take whitened rows along: words 0 and 1, and 2 and 3.
  __device__ __forceinline__ void LoadForRows(uint32_t (&b)[4],
                                              int row,
                                              int column,
                                              int lane) const {
    LoadMatrices(b, Tile(row, column) + (lane % 8 + lane / 16 * 8 + lane / 8 % 2 * 16) * 16);
  }

 private:
  __device__ __forceinline__ const std::byte* Tile(int row, int column) const {
    return tiles +
           HeadRecord::feedback_tile(static_cast<uint32_t>(row), static_cast<uint32_t>(column));
  }
};

}  // namespace crumb::gpu
