// SPDX-License-Identifier: Apache-2.0
//
// Where a head's parameters lie in its record of a DeviceProfile. Arithmetic for host and device.
//
// A "tile" is one operand B of an mma: a lane's registers for it lie side by side, 32 lanes one
// after another, so that a warp loads it whole and no shuffle is needed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crumb::gpu {

// The parts of one rotation matrix R. Keys of oscar-int2-tilted go back by another matrix than the
// one they were rotated with: the queries'.
enum RotationPart : uint32_t {
  kRotateUpper,  // R in bf16, tiles of m16n8k16: [dim/8 columns][dim/16 steps][32 lanes] of 8
                 // bytes.
  kRotateLower,  // R minus the above, in bf16; the same tiles.
  // R transposed, in fixed point of two digits, R = unit * (256 * upper + lower): tiles of m16n8k32
  // in s8, [dim/8 columns][dim/32 steps][32 lanes] of 8 bytes.
  kUnrotateUpper,
  kUnrotateLower,  // Padded to the size of a bf16 part, as the one above.
  kNumRotationParts,
};

struct HeadRecord {
  uint32_t dim;
  bool is_aware;
  bool is_tilted;  // Then it is aware too.

  static constexpr uint32_t kBlock = 16;  // Channels whose errors are fed back one by one.

  constexpr size_t matrix_bytes() const { return size_t{dim} * dim * 2; }
  constexpr size_t vector_bytes() const { return size_t{dim} * sizeof(float); }
  constexpr uint32_t num_blocks() const { return dim / kBlock; }

  // K's parts, then V's.
  constexpr size_t rotation(bool is_value, RotationPart part) const {
    return (size_t{is_value ? uint32_t{kNumRotationParts} : 0u} + part) * matrix_bytes();
  }
  constexpr size_t vectors() const { return size_t{2} * kNumRotationParts * matrix_bytes(); }
  // [dim] f32 each; zeros for V, but for the last. -mean * R, what rotated rows start from, for R
  // as its upper part alone has it and for both; the mean; and for each row of R the sum of its
  // elements, as the digits have them.
  constexpr size_t upper_shift(bool is_value) const { return vectors() + vector(is_value, 0); }
  constexpr size_t shift(bool is_value) const { return vectors() + vector(is_value, 1); }
  constexpr size_t mean(bool is_value) const { return vectors() + vector(is_value, 2); }
  constexpr size_t row_sums(bool is_value) const { return vectors() + vector(is_value, 3); }
  constexpr size_t scalars() const { return vectors() + 8 * vector_bytes(); }
  static constexpr size_t scalars_bytes() { return 64; }
  // The negative of the feedback factor C in fp16, each row divided by its diagonal element, so
  // that it takes errors as they are; in blocks of 16 x 16. [num_blocks, 16, 16]: those on the
  // diagonal, where the elements' inverses are, in a unit of their own (HeadScalars::loss_unit).
  constexpr size_t diagonal() const { return scalars() + scalars_bytes(); }
  constexpr size_t diagonal_bytes() const {
    return is_aware ? size_t{num_blocks()} * kDiagonalBytes : 0;
  }
  static constexpr size_t kDiagonalBytes = size_t{kBlock} * kBlock * 2;  // Of a block.
  // The blocks above those, transposed, for ldmatrix: quarters of 8 x 8, rows contiguous, in the
  // order of an operand A of m16n8k16. By columns, those of column block b are [b * (b - 1) / 2, +
  // b).
  constexpr size_t feedback() const { return diagonal() + diagonal_bytes(); }
  static constexpr size_t feedback_tile(uint32_t row, uint32_t column) {
    return (size_t{column} * (column - 1) / 2 + row) * kFeedbackTileBytes;
  }
  static constexpr size_t kFeedbackTileBytes = 512;
  constexpr size_t feedback_bytes() const {
    return is_aware ? size_t{num_blocks()} * (num_blocks() - 1) / 2 * kFeedbackTileBytes : 0;
  }

  // What oscar-int2-tilted adds. The upper and lower part of the queries' rotation; of other codecs
  // the keys' own.
  constexpr size_t query_rotation(RotationPart part) const {
    return is_tilted ? tilted() + part * matrix_bytes() : rotation(false, part);
  }
  // The inverses of the blocks on the diagonal of C, rows divided as above, in fp16: two operands
  // B of m16n8k16 each, of 16 bytes a lane.
  constexpr size_t whitening() const { return tilted() + 2 * matrix_bytes(); }
  constexpr size_t whitening_bytes() const { return size_t{num_blocks()} * kFeedbackTileBytes; }
  // The row of ones and the mean query, whitened by C^-1, as rows 0 and 1 of A of m16n8k16 in
  // fp16, to meet errors as they are, each in a unit of its own; rows 8..15 are left out.
  // [dim/16 steps][32 lanes] of 8 bytes.
  constexpr size_t readers() const { return whitening() + whitening_bytes(); }
  constexpr size_t readers_bytes() const { return size_t{num_blocks()} * 256; }

  constexpr size_t bytes() const {
    const size_t end = is_tilted ? readers() + readers_bytes() : tilted();
    return (end + 255) / 256 * 256;
  }

 private:
  constexpr size_t tilted() const { return feedback() + feedback_bytes(); }
  constexpr size_t vector(bool is_value, uint32_t which) const {
    return (size_t{is_value ? 4u : 0u} + which) * vector_bytes();
  }
};

// What lies at scalars(). Index 0 is K, 1 is V.
struct HeadScalars {
  // The clip threshold is the n-th largest magnitude; 0: no clip; kByDeviation: no range at all,
  // see round_deviation.cuh.
  static constexpr uint32_t kByDeviation = 0xffffffff;
  uint32_t clip_from_top[2];
  float digit_unit[2];  // Of kUnrotateUpper and kUnrotateLower.
  // With feedback: what the squares of errors times diagonal() are a loss in.
  float loss_unit;
  // Of oscar-int2-tilted: the row of ones times itself in the metric, the sum of the mean query,
  // and the units of the two rows of readers().
  float ones_in_metric;
  float query_mean_sum;
  float ones_unit;
  float mean_unit;
};
static_assert(sizeof(HeadScalars) <= HeadRecord::scalars_bytes());

}  // namespace crumb::gpu
