// SPDX-License-Identifier: Apache-2.0
//
// The fast rotation: a matrix product with one small square matrix, written once over a vector type
// and compiled once an instruction set.
//
// rows * R goes by tiles of kRows x kVectors accumulators, each element of a row broadcast against
// vectors of R's row, which lie in memory as they are needed: nothing is packed. rows * R^T goes by
// dot products along R's rows, kLanes of them at a time, so that their sums end in one vector.
//
// A translation unit defines `Simd` in an unnamed namespace and takes MakeRotateFunctions<Simd>():
//   Vector, kLanes (4, 8 or 16), kAccumulators (vectors a tile may hold in registers)
//   Zero(), Load(const float*), Broadcast(const float*), Fma(x, y, sum)
//   SumEach(const Vector (&)[kLanes]): lane l is the sum of vector l's lanes
//   Store(Vector, float*), Store(Vector, BFloat16*): as BFloat16::FromFloat
#pragma once

#include <cstddef>
#include <utility>

#include "proto/base/bfloat16.h"
#include "proto/page/page_format.h"

namespace crumb::cpu {

struct RotateArgs {
  const float* rows = nullptr;  // [num_rows, dim] f32, dense.
  size_t num_rows = 0;
  size_t dim = 0;                   // A multiple of 32, at most kMaxHeadDim.
  const float* mean = nullptr;      // [dim] f32, subtracted from each row; nullable.
  const float* rotation = nullptr;  // [dim, dim] f32, row-major.
};

// One instruction set's kernels.
struct RotateFunctions {
  void (*rotate_to_bf16)(const RotateArgs& args, BFloat16* out);  // (rows - mean) * rotation
  void (*rotate_to_float)(const RotateArgs& args, float* out);    // (rows - mean) * rotation
  void (*rotate_back)(const RotateArgs& args, float* out);        // rows * rotation^T
};

const RotateFunctions& PortableRotateFunctions();
const RotateFunctions& Avx2RotateFunctions();
const RotateFunctions& Avx512RotateFunctions();

// out[kRows, kVectors * kLanes] = rows[kRows, dim] * columns of the rotation, from `rotation` on.
template <typename Simd, size_t kRows, size_t kVectors, typename Out>
void RotateTile(const float* rows, size_t row_stride, const float* rotation, size_t dim, Out* out) {
  typename Simd::Vector sums[kRows][kVectors];
#pragma GCC unroll 16
  for (size_t row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (size_t v = 0; v < kVectors; ++v) {
      sums[row][v] = Simd::Zero();
    }
  }
  for (size_t k = 0; k < dim; ++k) {
    typename Simd::Vector columns[kVectors];
#pragma GCC unroll 8
    for (size_t v = 0; v < kVectors; ++v) {
      columns[v] = Simd::Load(rotation + k * dim + v * Simd::kLanes);
    }
#pragma GCC unroll 16
    for (size_t row = 0; row < kRows; ++row) {
      const typename Simd::Vector x = Simd::Broadcast(rows + row * row_stride + k);
#pragma GCC unroll 8
      for (size_t v = 0; v < kVectors; ++v) {
        sums[row][v] = Simd::Fma(x, columns[v], sums[row][v]);
      }
    }
  }
#pragma GCC unroll 16
  for (size_t row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
    for (size_t v = 0; v < kVectors; ++v) {
      Simd::Store(sums[row][v], out + row * dim + v * Simd::kLanes);
    }
  }
}

template <typename Simd, size_t kRows, size_t kVectors, typename Out>
void RotateColumns(
    const float* rows, size_t row_stride, const float* rotation, size_t dim, Out* out) {
  for (size_t column = 0; column < dim; column += kVectors * Simd::kLanes) {
    RotateTile<Simd, kRows, kVectors>(rows, row_stride, rotation + column, dim, out + column);
  }
}

// Few rows want many columns side by side, or each addition waits for the one before.
template <typename Simd, size_t kRows, typename Out>
void RotateRows(const float* rows, size_t row_stride, const float* rotation, size_t dim, Out* out) {
  constexpr size_t kVectors = kRows * 8 <= Simd::kAccumulators   ? 8
                              : kRows * 4 <= Simd::kAccumulators ? 4
                                                                 : 2;
  if (dim % (kVectors * Simd::kLanes) == 0) {
    RotateColumns<Simd, kRows, kVectors>(rows, row_stride, rotation, dim, out);
  } else {
    RotateColumns<Simd, kRows, 2>(rows, row_stride, rotation, dim, out);
  }
}

// The tile height is a template's number; this takes it at run time, 1..sizeof...(kRowsLessOne).
template <typename Simd, typename Out, size_t... kRowsLessOne>
void RotateBlock(const RotateArgs& block,
                 size_t row_stride,
                 Out* out,
                 std::index_sequence<kRowsLessOne...> /*unused*/) {
  static_cast<void>(
      ((block.num_rows == kRowsLessOne + 1 &&
        (RotateRows<Simd, kRowsLessOne + 1>(block.rows, row_stride, block.rotation, block.dim, out),
         true)) ||
       ...));
}

// Static: each instruction set has its own.
static inline void SubtractMean(const RotateArgs& block, size_t out_stride, float* out) {
  for (size_t row = 0; row < block.num_rows; ++row) {
    for (size_t k = 0; k < block.dim; ++k) {
      out[row * out_stride + k] = block.rows[row * block.dim + k] - block.mean[k];
    }
  }
}

template <typename Simd, typename Out>
void Rotate(const RotateArgs& args, Out* out) {
  constexpr size_t kMaxRows = Simd::kAccumulators / 2;
  constexpr size_t kStride = size_t{kMaxHeadDim} + 16;  // Not a power of two: see cache sets.
  alignas(64) float shifted[kMaxRows * kStride];
  const size_t num_blocks = (args.num_rows + kMaxRows - 1) / kMaxRows;
  RotateArgs block = args;
  size_t stride = args.dim;
  size_t done = 0;
  for (size_t i = 0; i < num_blocks; ++i, done += block.num_rows) {
    // Blocks of even size: a last block of one row would cost as much as one of four.
    block.num_rows = (args.num_rows - done + num_blocks - i - 1) / (num_blocks - i);
    block.rows = args.rows + done * args.dim;
    if (args.mean != nullptr) {
      SubtractMean(block, kStride, shifted);
      block.rows = shifted;
      stride = kStride;
    }
    RotateBlock<Simd>(block, stride, out + done * args.dim, std::make_index_sequence<kMaxRows>());
  }
}

// out[kRows, kColumns] = rows[kRows, dim] * (kColumns rows of the rotation)^T.
template <typename Simd, size_t kRows, size_t kColumns>
void RotateBackTile(const float* rows, const float* rotation, size_t dim, float* out) {
  static_assert(kRows * kColumns == Simd::kLanes, "one vector holds the tile's sums");
  typename Simd::Vector sums[Simd::kLanes];
#pragma GCC unroll 16
  for (size_t i = 0; i < Simd::kLanes; ++i) {
    sums[i] = Simd::Zero();
  }
  for (size_t k = 0; k < dim; k += Simd::kLanes) {
    typename Simd::Vector columns[kColumns];
#pragma GCC unroll 16
    for (size_t c = 0; c < kColumns; ++c) {
      columns[c] = Simd::Load(rotation + c * dim + k);
    }
#pragma GCC unroll 4
    for (size_t row = 0; row < kRows; ++row) {
      const typename Simd::Vector x = Simd::Load(rows + row * dim + k);
#pragma GCC unroll 16
      for (size_t c = 0; c < kColumns; ++c) {
        sums[row * kColumns + c] = Simd::Fma(x, columns[c], sums[row * kColumns + c]);
      }
    }
  }
  alignas(64) float lanes[Simd::kLanes];
  Simd::Store(Simd::SumEach(sums), lanes);
  for (size_t row = 0; row < kRows; ++row) {
    for (size_t c = 0; c < kColumns; ++c) {
      out[row * dim + c] = lanes[row * kColumns + c];
    }
  }
}

template <typename Simd>
void RotateBack(const RotateArgs& args, float* out) {
  constexpr size_t kRows = Simd::kLanes == 16 ? 4 : 2;
  constexpr size_t kColumns = Simd::kLanes / kRows;
  const size_t dim = args.dim;
  size_t row = 0;
  for (; row + kRows <= args.num_rows; row += kRows) {
    for (size_t column = 0; column < dim; column += kColumns) {
      RotateBackTile<Simd, kRows, kColumns>(args.rows + row * dim, args.rotation + column * dim,
                                            dim, out + row * dim + column);
    }
  }
  for (; row < args.num_rows; ++row) {
    for (size_t column = 0; column < dim; column += Simd::kLanes) {
      RotateBackTile<Simd, 1, Simd::kLanes>(args.rows + row * dim, args.rotation + column * dim,
                                            dim, out + row * dim + column);
    }
  }
}

template <typename Simd>
constexpr RotateFunctions MakeRotateFunctions() {
  return {
      .rotate_to_bf16 = [](const RotateArgs& args, BFloat16* out) { Rotate<Simd>(args, out); },
      .rotate_to_float = [](const RotateArgs& args, float* out) { Rotate<Simd>(args, out); },
      .rotate_back = [](const RotateArgs& args, float* out) { RotateBack<Simd>(args, out); },
  };
}

}  // namespace crumb::cpu
