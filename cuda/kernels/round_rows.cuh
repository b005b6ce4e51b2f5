// SPDX-License-Identifier: Apache-2.0
//
// Rows of BF16 to two bits, the same bits as the CPU's: clip at an exact order statistic, one
// affine range a row, round to nearest.
//
// A warp takes eight rows, four lanes each: lane r + 8 p has the chunks p, p + 4, ... of row r, of
// eight channels each, as bf16 pairs. Magnitudes of bf16 are ordered like their 15 bits, so the
// order statistic is found by bisection over those, counting by packed comparisons. Division is
// kept out of the elements: rounding is monotone, so each row has three bf16 values from which on
// the code is 1, 2 and 3, found exactly once a row.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/kernels/page_rows.cuh"

namespace crumb::gpu {

__device__ __forceinline__ uint32_t AsWord(__nv_bfloat162 pair) {
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}
__device__ __forceinline__ __nv_bfloat162 AsPair(uint32_t word) {
  __nv_bfloat162 pair;
  memcpy(&pair, &word, sizeof(pair));
  return pair;
}
// One bf16, given by its bits, in both halves.
__device__ __forceinline__ __nv_bfloat162 PairOf(uint32_t bits) {
  return AsPair(bits | bits << 16);
}
__device__ __forceinline__ float FloatOfBf16(uint32_t bits) {
  return __uint_as_float(bits << 16);
}

// Over the four lanes of a row.
template <typename Combine>
__device__ __forceinline__ auto ReduceRow(auto value, Combine&& combine) {
  value = combine(value, __shfl_xor_sync(kFullWarp, value, 8));
  return combine(value, __shfl_xor_sync(kFullWarp, value, 16));
}

inline constexpr float kMaxHalf = 65504.0f;

struct RowLevels {
  float scale;
  float min;
};

// Scale and minimum as they are stored.
__device__ __forceinline__ float ToStoredScale(float x) {
  constexpr float kMinScale = 1.0f / (1u << 24);
  return fmaxf(__half2float(__float2half_rn(fminf(x, kMaxHalf))), kMinScale);
}
__device__ __forceinline__ float ToStoredMin(float x) {
  x = fminf(fmaxf(__fadd_rn(x, 0.0f), -kMaxHalf), kMaxHalf);  // A -0 becomes 0.
  return __half2float(__float2half_rn(x));
}

// As the twin's Levels (cuda/reference/demote.cc).
__device__ __forceinline__ RowLevels MakeLevels(float low, float high, float tau) {
  low = fminf(fmaxf(low, -tau), tau);
  high = fminf(fmaxf(high, -tau), tau);
  RowLevels levels;
  levels.min = ToStoredMin(low);
  levels.scale = ToStoredScale(__fdiv_rn(__fsub_rn(high, levels.min), 3.0f));
  return levels;
}

// The bf16 magnitude `bits` as a clip threshold.
__device__ __forceinline__ float ClipThreshold(int bits) {
  return __half2float(__float2half_rn(fminf(FloatOfBf16(static_cast<uint32_t>(bits)), kMaxHalf)));
}

// One lane's share of a row, and what all four lanes of the row know of it.
template <int kDim>
struct RowShare {
  static constexpr int kChunks = kDim / 32;
  __nv_bfloat162 pairs[kChunks][4];
  int largest;  // Magnitude's bits; 0x7f80 and more: the row holds inf or NaN.
  float low;
  float high;

  __device__ __forceinline__ void Load(const std::byte* row, int part) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint4 chunk = *reinterpret_cast<const uint4*>(row + (part + 4 * i) * 16);
      pairs[i][0] = AsPair(chunk.x);
      pairs[i][1] = AsPair(chunk.y);
      pairs[i][2] = AsPair(chunk.z);
      pairs[i][3] = AsPair(chunk.w);
    }
    __nv_bfloat162 most = AsPair(0);
    __nv_bfloat162 least = pairs[0][0];
    __nv_bfloat162 greatest = pairs[0][0];
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        most = __hmax2_nan(most, __habs2(pairs[i][j]));
        least = __hmin2(least, pairs[i][j]);
        greatest = __hmax2(greatest, pairs[i][j]);
      }
    }
    const uint32_t word = AsWord(most) & 0x7fff7fffu;
    const int mine = static_cast<int>(max(word & 0xffff, word >> 16));
    largest = ReduceRow(mine, [](int a, int b) { return max(a, b); });
    low = ReduceRow(fminf(__low2float(least), __high2float(least)),
                    [](float a, float b) { return fminf(a, b); });
    high = ReduceRow(fmaxf(__low2float(greatest), __high2float(greatest)),
                     [](float a, float b) { return fmaxf(a, b); });
  }

  // Of the whole row.
  __device__ __forceinline__ float SumOfSquares() const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = __bfloat1622float2(pairs[i][j]);
        sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
      }
    }
    return ReduceRow(sum, [](float a, float b) { return a + b; });
  }

  // (x - center) * factor of the share in fp16, to the row that it was loaded from.
  __device__ __forceinline__ void StoreHalves(std::byte* row,
                                              int part,
                                              float factor,
                                              float center) const {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      __half2 halves[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = __bfloat1622float2(pairs[i][j]);
        halves[j] = __floats2half2_rn((x.x - center) * factor, (x.y - center) * factor);
      }
      memcpy(row + (part + 4 * i) * 16, halves, sizeof(halves));
    }
  }

  // How many of the lane's magnitudes are at least `bits`.
  __device__ __forceinline__ float CountInShare(int bits) const {
    const __nv_bfloat162 bound = PairOf(static_cast<uint32_t>(bits));
    __nv_bfloat162 counts[2] = {AsPair(0), AsPair(0)};
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        counts[j % 2] = __hadd2(counts[j % 2], __hge2(__habs2(pairs[i][j]), bound));
      }
    }
    const __nv_bfloat162 both = __hadd2(counts[0], counts[1]);  // At most 64: exact in bf16.
    return __low2float(both) + __high2float(both);
  }

  // How many of the row's magnitudes are at least each of `bits`. Three counts are digits of one
  // word, so that they take one pair of shuffles.
  template <int kRanks>
  __device__ __forceinline__ void CountFrom(const int (&bits)[kRanks],
                                            int (&counts)[kRanks]) const {
    static_assert(kRanks <= 3 && kDim < 512, "counts must fit into ten bits each");
    // Added to a small whole number, leaves it in the low bits.
    constexpr float kWhole = 8388608.0f;
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      word += (__float_as_uint(CountInShare(bits[i]) + kWhole) & 0x3ffu) << (10 * i);
    }
    word = ReduceRow(word, [](uint32_t a, uint32_t b) { return a + b; });
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      counts[i] = static_cast<int>(word >> (10 * i) & 0x3ffu);
    }
  }

  // Bits of the n-th largest magnitudes, for each n from 1 to kDim, ascending; `most` is that of
  // the largest. By bisection, all at once: a round waits for its shuffles more than for its sums.
  template <int kRanks>
  __device__ __forceinline__ void FindLargest(const int (&n)[kRanks],
                                              int most,
                                              int (&largest)[kRanks]) const {
    int start[1] = {max(most - 127, 0)};  // Within a factor of two, nearly always.
    while (true) {
      int count[1];
      CountFrom(start, count);
      const bool is_short = count[0] < n[kRanks - 1] && start[0] > 0;
      if (!__any_sync(kFullWarp, is_short)) {
        break;
      }
      start[0] = is_short ? max(2 * start[0] - most - 1, 0) : start[0];
    }
    int high[kRanks];
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      largest[i] = start[0];  // At least n magnitudes reach it,
      high[i] = most;         // and fewer go beyond this.
    }
    bool is_open = start[0] < most;
    while (__any_sync(kFullWarp, is_open)) {
      int middle[kRanks];
      int counts[kRanks];
#pragma unroll
      for (int i = 0; i < kRanks; ++i) {
        middle[i] = (largest[i] + high[i] + 1) >> 1;
      }
      CountFrom(middle, counts);
      is_open = false;
#pragma unroll
      for (int i = 0; i < kRanks; ++i) {
        if (counts[i] >= n[i]) {
          largest[i] = middle[i];
        } else {
          high[i] = max(middle[i] - 1, largest[i]);
        }
        is_open = is_open || largest[i] < high[i];
      }
    }
  }

  // Codes of the share, 16 bits a chunk, given the bf16 from which on the code is 1, 2 and 3.
  __device__ __forceinline__ void StoreCodes(const uint32_t (&from)[3],
                                             std::byte* row_words,
                                             int part) const {
    const __nv_bfloat162 bounds[3] = {PairOf(from[0]), PairOf(from[1]), PairOf(from[2])};
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      uint32_t codes = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t one = __hge2_mask(pairs[i][j], bounds[0]);
        const uint32_t two = __hge2_mask(pairs[i][j], bounds[1]);
        const uint32_t three = __hge2_mask(pairs[i][j], bounds[2]);
        // The first of a pair has the lower half's mask, the second the upper half's.
        codes |= (one ^ two ^ three) & (0x00040001u << (4 * j));
        codes |= two & (0x00080002u << (4 * j));
      }
      *reinterpret_cast<uint16_t*>(row_words + (part + 4 * i) * 2) =
          static_cast<uint16_t>(codes | codes >> 16);
    }
  }
};

// The bf16 numbers in order as integers: +0 is 0, -0 is -1.
constexpr int kKeyOfInfinity = 0x7f80;
constexpr int kKeyOfMinusInfinity = -0x7f81;
__device__ __forceinline__ int KeyOfBits(uint32_t bits) {
  return (bits & 0x8000u) != 0 ? -static_cast<int>(bits & 0x7fffu) - 1 : static_cast<int>(bits);
}
__device__ __forceinline__ uint32_t BitsOfKey(int key) {
  return key >= 0 ? static_cast<uint32_t>(key) : 0x8000u | static_cast<uint32_t>(-key - 1);
}

// Whether the float below scale / 2, divided by `scale`, plus 1/2, rounds to 1. The quotient must
// round to the float below 1/2, which is more than 1/2 - 1.5 steps: so where a step of scale / 2 is
// less than that part of the scale, for significands above 4/3, or is halved, for 1.
__device__ __forceinline__ bool BelowHalfRoundsUp(float scale) {
  const uint32_t fraction = __float_as_uint(scale) & 0x7fffffu;
  return fraction == 0 || 3 * fraction > 0x800000u;
}

// The smallest bf16 whose code is at least `code`, 1..3: bits; infinity where no number has it.
// Exactly where floor((clamp(x) - min) / scale + 0.5) >= code in rounded arithmetic: that is
// x - min >= (code - 1/2) * scale, but for code 1, where the number below 1/2 may round up too.
__device__ __forceinline__ uint32_t FirstWithCode(const RowLevels& levels, float tau, int code) {
  const float middle = static_cast<float>(code) - 0.5f;
  float bound = __fmul_rn(middle, levels.scale);  // Exact: 11 bits by two.
  if (code == 1 && BelowHalfRoundsUp(levels.scale)) {
    bound = __uint_as_float(__float_as_uint(bound) - 1);
  }
  const auto reaches = [&](int key) {
    const float x = fminf(fmaxf(FloatOfBf16(BitsOfKey(key)), -tau), tau);
    return __fsub_rn(x, levels.min) >= bound;
  };
  float about = __fadd_rn(bound, levels.min);
  if (about == 0) {  // Then it is where x - min first rounds up to `bound`: half a step below zero.
    about = __uint_as_float(((__float_as_uint(bound) & 0x7f800000u) - (24u << 23)) | 0x80000000u);
  }
  // Cut to bf16 this is the number wanted, or beside it.
  const int guess = min(max(KeyOfBits(__float_as_uint(about) >> 16), kKeyOfMinusInfinity + 2),
                        kKeyOfInfinity - 2);
  const bool at_guess = reaches(guess);
  if (!reaches(guess - 1) && reaches(guess + 1)) {
    return BitsOfKey(at_guess ? guess : guess + 1);
  }
  int low = kKeyOfMinusInfinity;
  int high = kKeyOfInfinity;
  while (high - low > 1) {
    const int key = (low + high) >> 1;
    if (reaches(key)) {
      high = key;
    } else {
      low = key;
    }
  }
  return BitsOfKey(high);
}

// Eight rows from `rows` on, one warp; false in lanes of rows that are not finite.
template <int kDim>
__device__ __forceinline__ bool RoundToNearest(const std::byte* rows,
                                               int clip_from_top,
                                               int first_token,
                                               uint32_t* row_words,
                                               __half2* meta,
                                               int lane) {
  using Tile = PageTile<kDim>;
  const int token = first_token + lane % 8;
  const int part = lane / 8;
  RowShare<kDim> share;
  share.Load(rows + token * Tile::kStride, part);
  float tau = INFINITY;
  if (clip_from_top > 0) {
    int clip[1];
    share.template FindLargest<1>({clip_from_top}, min(share.largest, 0x7f7f), clip);
    tau = ClipThreshold(clip[0]);
  }
  const RowLevels levels = MakeLevels(share.low, share.high, tau);
  const uint32_t mine = FirstWithCode(levels, tau, max(part, 1));
  const uint32_t from[3] = {__shfl_sync(kFullWarp, mine, lane % 8 + 8),
                            __shfl_sync(kFullWarp, mine, lane % 8 + 16),
                            __shfl_sync(kFullWarp, mine, lane % 8 + 24)};
  share.StoreCodes(from, reinterpret_cast<std::byte*>(row_words + token * Tile::kWordStride), part);
  if (part == 0) {
    meta[Int2HeadBlock::MetaIndex(static_cast<uint32_t>(token))] =
        __floats2half2_rn(levels.scale, levels.min);
  }
  return share.largest < 0x7f80;
}

}  // namespace crumb::gpu
