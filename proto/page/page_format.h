// SPDX-License-Identifier: Apache-2.0
//
// Page format v1: where each element of a page lies, as constexpr arithmetic. This file *is* the
// format: CPU code, kernels and tests all use it, and golden bytes in tests/proto hold it still.
//
// The INT2 layout is made for `mma.m16n8k32` (u8 x s8): a 32-bit word loaded by lane 4*g + t is its
// A operand after one shift and four ANDs. All integers are little-endian.
//
//   INT2 head block   [K codes | V codes | K meta | V meta]      T*dk/4 + T*dv/4 + 4T + 4T bytes
//   BF16 head block   [K: T x dk][V: T x dv], row-major by token  2T*(dk + dv) bytes
//
// with T = kPageTokens, dk = key_dim, dv = value_dim. Rows are rotated (and keys mean-shifted) as
// the model profile says. The page image is the head blocks in the order [kv_head][layer].
#pragma once

#include <cstddef>
#include <cstdint>

namespace crumb {

inline constexpr uint32_t kPageFormatVersion = 1;
inline constexpr uint32_t kPageTokens = 64;
inline constexpr uint32_t kMaxHeadDim = 512;

enum class PageEncoding : uint8_t {
  kInt2 = 1,  // Codes of two bits with a scale and a minimum a row.
  kBf16 = 2,  // Rotated rows in bfloat16: the sink, and the tail of a published prefix.
};

constexpr bool IsValidHeadDim(uint32_t dim) {
  return dim >= 32 && dim <= kMaxHeadDim && dim % 32 == 0;
}

// Where the two bits of one code are: `shift` counts from bit 0 of the byte at `byte`.
struct CodePosition {
  size_t byte;
  uint32_t shift;
  friend constexpr bool operator==(CodePosition, CodePosition) = default;
};

struct Int2HeadBlock {
  uint32_t key_dim;
  uint32_t value_dim;

  constexpr size_t key_codes_bytes() const { return size_t{kPageTokens} * key_dim / 4; }
  constexpr size_t value_codes_bytes() const { return size_t{kPageTokens} * value_dim / 4; }
  static constexpr size_t meta_bytes() { return size_t{kPageTokens} * 4; }  // Of K, and of V.

  static constexpr size_t key_codes_offset() { return 0; }
  constexpr size_t value_codes_offset() const { return key_codes_bytes(); }
  constexpr size_t key_meta_offset() const { return value_codes_offset() + value_codes_bytes(); }
  constexpr size_t value_meta_offset() const { return key_meta_offset() + meta_bytes(); }
  constexpr size_t bytes() const { return value_meta_offset() + meta_bytes(); }

  // A lane's words, counted over tiles and then steps, lie in vectors of four so that it loads 16
  // contiguous bytes whatever the head_dim: word w of a lane is word w % 4 of vector w / 4.
  static constexpr size_t WordIndex(uint32_t word_of_lane, uint32_t lane) {
    return (size_t{word_of_lane / 4} * 32 + lane) * 4 + word_of_lane % 4;
  }

  // K: tile mt = token / 16, step ks = channel / 32. Byte j of the word of lane (g, t) holds, from
  // bit 0: (token g, channel 4t+j), (g+8, 4t+j), (g, 16+4t+j), (g+8, 16+4t+j).
  // Relative to the block's start. token < kPageTokens, channel < key_dim.
  constexpr CodePosition KeyCode(uint32_t token, uint32_t channel) const {
    const uint32_t tile = token / 16;
    const uint32_t row_half = (token % 16) / 8;
    const uint32_t g = token % 8;
    const uint32_t step = channel / 32;
    const uint32_t channel_half = (channel % 32) / 16;
    const uint32_t t = (channel % 16) / 4;
    const uint32_t j = channel % 4;
    const size_t word = WordIndex(tile * (key_dim / 32) + step, 4 * g + t);
    return {key_codes_offset() + 4 * word + j, 4 * channel_half + 2 * row_half};
  }

  // V: tile mt = channel / 16; token = 16 j + 8 kk + 4 half + t. Byte j of word (mt, kk) of lane
  // (g, t) holds, from bit 0: (channel g, half 0), (g+8, half 0), (g, half 1), (g+8, half 1). This
  // order of tokens is what the accumulators of the scores give without a transpose.
  constexpr CodePosition ValueCode(uint32_t token, uint32_t channel) const {
    const uint32_t tile = channel / 16;
    const uint32_t row_half = (channel % 16) / 8;
    const uint32_t g = channel % 8;
    const uint32_t j = token / 16;
    const uint32_t kk = (token % 16) / 8;
    const uint32_t token_half = (token % 8) / 4;
    const uint32_t t = token % 4;
    const size_t word = WordIndex(tile * 2 + kk, 4 * g + t);
    return {value_codes_offset() + 4 * word + j, 4 * token_half + 2 * row_half};
  }

  // Index of a token's (scale, min) pair of fp16 among the 64 pairs of K's or V's meta: a lane
  // reads the eight tokens of its g in two 128-bit loads.
  static constexpr size_t MetaIndex(uint32_t token) {
    const uint32_t tile = token / 16;
    const uint32_t row_half = (token % 16) / 8;
    const uint32_t g = token % 8;
    return size_t{8} * g + size_t{4} * row_half + tile;
  }
  constexpr size_t KeyMetaByte(uint32_t token) const {
    return key_meta_offset() + 4 * MetaIndex(token);
  }
  constexpr size_t ValueMetaByte(uint32_t token) const {
    return value_meta_offset() + 4 * MetaIndex(token);
  }
};

struct Bf16HeadBlock {
  uint32_t key_dim;
  uint32_t value_dim;

  static constexpr size_t key_offset() { return 0; }
  constexpr size_t value_offset() const { return size_t{kPageTokens} * key_dim * 2; }
  constexpr size_t bytes() const { return size_t{kPageTokens} * (key_dim + value_dim) * 2; }
};

static_assert(Int2HeadBlock{128, 128}.bytes() == 4608);
static_assert(Int2HeadBlock{64, 64}.bytes() == 2560);
static_assert(Int2HeadBlock{256, 256}.bytes() == 8704);

}  // namespace crumb
