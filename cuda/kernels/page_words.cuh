// SPDX-License-Identifier: Apache-2.0
//
// Codes of sixteen rows in the registers of a warp, as RowPairs has them, into the words of the
// page format. The format was made for the same operands, so a token's neighbours in a byte of K
// are in one lane, and those of a byte of V in two.
#pragma once

#include <cstdint>

#include "cuda/kernels/round_nearest.cuh"

namespace crumb::gpu {

// Four codes of either half, in its low byte: of two words of each of two pairs.
__device__ __forceinline__ uint32_t FourCodes(uint32_t low, uint32_t high) {
  return (low & 0x0f0f0f0fu) | (high << 4 & 0xf0f0f0f0u);  // Other bytes are not looked at.
}

// The words of lane `lane` of the page's order, of K's tokens from 16 `tile` on, to K's part of a
// head block.
template <int kDim>
__device__ __forceinline__ void StoreKeyWords(const uint32_t (&words)[kDim / 32],
                                              std::byte* codes,
                                              int tile,
                                              int lane) {
  if constexpr (kDim == 64) {
    reinterpret_cast<uint2*>(codes)[(tile / 2 * 32 + lane) * 2 + tile % 2] =
        make_uint2(words[0], words[1]);
  } else {
    auto* to = reinterpret_cast<uint4*>(codes) + tile * (kDim / 128) * 32 + lane;
#pragma unroll
    for (int i = 0; i < kDim / 128; ++i) {
      to[i * 32] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    }
  }
}

// K's words of a warp's sixteen tokens.
template <int kDim>
struct KeyWords {
  static constexpr int kSteps = kDim / 32;
  uint32_t words[kSteps];  // Of lane target(lane) of the page's order.

  static __device__ __forceinline__ int target(int lane) {
    return lane / 4 * 4 + lane % 2 * 2 + lane % 4 / 2;
  }

  // A lane has one half of the words of two lanes; its neighbour has the other.
  __device__ __forceinline__ void Pack(const RowPairs<kDim>& rows,
                                       const CodeBounds (&bounds)[2],
                                       int lane) {
    const auto codes = [&](int n) {
      const auto& a = rows.words[n];
      const auto& b = rows.words[n + 2];
      return FourCodes(TwoCodes(a[0], bounds[0], a[1], bounds[1]),
                       TwoCodes(b[0], bounds[0], b[1], bounds[1]));
    };
    const bool is_odd = lane % 2 != 0;
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      uint32_t halves[2];  // Of two steps each; the first for lanes t < 2, the second for others.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        halves[i] = __byte_perm(codes(4 * step + i), codes(4 * step + 4 + i), 0x6420);
      }
      const uint32_t kept = is_odd ? halves[1] : halves[0];
      const uint32_t given = is_odd ? halves[0] : halves[1];
      const uint32_t taken = __shfl_xor_sync(kFullWarp, given, 1);
      const uint32_t low = is_odd ? taken : kept;
      const uint32_t high = is_odd ? kept : taken;
      words[step] = LowHalves(low, high);
      words[step + 1] = HighHalves(low, high);
    }
  }

  // `codes` is K's part of a head block; tokens are 16 `tile` on.
  __device__ __forceinline__ void Store(std::byte* codes, int tile, int lane) const {
    StoreKeyWords<kDim>(words, codes, tile, target(lane));
  }
};

// V's codes in shared memory on their way to a page: byte w of a word of the page is from tokens
// 16 w on, so each of four warps has a plane of one byte of every word.
template <int kDim>
struct ValuePlanes {
  static constexpr int kVectors = kDim / 32;  // Of four words each, a lane.
  alignas(16) uint32_t words[4][kVectors][32];

  __device__ __forceinline__ void Pack(const RowPairs<kDim>& rows,
                                       const CodeBounds (&bounds)[2],
                                       int warp,
                                       int lane) {
    const auto codes = [&](int n) {
      const auto& a = rows.words[n];
      const auto& b = rows.words[n + 1];
      return FourCodes(TwoCodes(a[0], bounds[0], b[0], bounds[0]),
                       TwoCodes(a[1], bounds[1], b[1], bounds[1]));
    };
    // Tokens t and t + 4 share a byte: lanes of g < 4 take channel 2 t of theirs, others 2 t + 1.
    const bool is_upper = lane >= 16;
    const int target = 8 * (lane % 4) + (is_upper ? 4 : 0) + lane / 4 % 4;
#pragma unroll
    for (int i = 0; i < kVectors; i += 2) {
      const uint32_t ab = __byte_perm(codes(4 * i), codes(4 * i + 2), 0x6240);
      const uint32_t cd = __byte_perm(codes(4 * i + 4), codes(4 * i + 6), 0x6240);
      const uint32_t even = LowHalves(ab, cd);
      const uint32_t odd = HighHalves(ab, cd);
      const uint32_t kept = is_upper ? odd : even;
      const uint32_t taken = __shfl_xor_sync(kFullWarp, is_upper ? even : odd, 16);
      const uint32_t first = is_upper ? taken : kept;
      const uint32_t second = is_upper ? kept : taken;
      const uint32_t low = (first & 0x0f0f0f0fu) | (second << 4 & 0xf0f0f0f0u);
      const uint32_t high = (first >> 4 & 0x0f0f0f0fu) | (second & 0xf0f0f0f0u);
      words[warp][i][target] = __byte_perm(low, high, 0x5140);
      words[warp][i + 1][target] = __byte_perm(low, high, 0x7362);
    }
  }

  // `codes` is V's part of a head block; kThreads threads, after all four planes are there.
  template <int kThreads>
  __device__ __forceinline__ void Store(std::byte* codes) const {
    const auto* planes = &words[0][0][0];
#pragma unroll
    for (int first = 0; first < kDim; first += kThreads) {
      const int i = first + static_cast<int>(threadIdx.x);
      if (kDim % kThreads != 0 && i >= kDim) {
        break;
      }
      uint32_t p[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        p[j] = planes[j * kDim + i];
      }
      const uint32_t low[2] = {__byte_perm(p[0], p[1], 0x5140), __byte_perm(p[2], p[3], 0x5140)};
      const uint32_t high[2] = {__byte_perm(p[0], p[1], 0x7362), __byte_perm(p[2], p[3], 0x7362)};
      reinterpret_cast<uint4*>(codes)[i] =
          make_uint4(LowHalves(low[0], low[1]), HighHalves(low[0], low[1]),
                     LowHalves(high[0], high[1]), HighHalves(high[0], high[1]));
    }
  }
};

}  // namespace crumb::gpu
