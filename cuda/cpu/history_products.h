// SPDX-License-Identifier: Apache-2.0
//
// The integer products of attention to one INT2 page, over the vector type `Simd` that the
// including file has defined. Codes are read from the head block as they lie, 16 bytes at a time,
// into vectors whose lanes are tokens (keys) or channels (values), and unpacked once for all of a
// chunk's rows.
//
// Odd pairs of bits are masked in place, not shifted: codes of tokens (keys) and channels (values)
// with row half 1 enter four times too large, which their scale takes back.
//
// Limit: 64 tokens of head_dim 128 and four query rows are 65,536 multiply-adds, 1,024 products of
// 64 bytes; everything else runs beside them on a Zen 4 core's other pipes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/cpu/split_attention_kernel.h"

namespace crumb::cpu {

template <typename Simd>
class HistoryProducts {
  using Float = typename Simd::Float;
  using Int = typename Simd::Int;
  static constexpr size_t kLanes = Simd::kLanes;
  static constexpr size_t kQuarters = kLanes / 4;  // Groups of four lanes in a vector.
  // Word pairs multiplied together: as many as there are registers for their sums.
  static constexpr size_t kPairs = Simd::kRegisters / 16;

 public:
  // Calls f(constant) with the steps of 32 channels that MultiplyKeys takes at once.
  template <typename F>
  static void WithStepsAtOnce(size_t key_dim, F f) {
    if (key_dim % 128 == 0) {
      f(std::integral_constant<size_t, 4>());
    } else if (key_dim == 64) {
      f(std::integral_constant<size_t, 2>());
    } else {
      f(std::integral_constant<size_t, 1>());
    }
  }

  // Products of `digits` (of the first of kRows rows) with the keys' codes. Calls
  // take(row, position, sums) for each row and vector of tokens.
  template <size_t kRows, size_t kSteps, typename Take>
  __attribute__((always_inline)) static void MultiplyKeys(const PageArgs& page,
                                                          const int32_t* digits,
                                                          Take take) {
    const std::byte* ahead = page.ahead;
    for (size_t g = 0; g < 8; g += kQuarters) {
      Int sums[2][kRows];
#pragma GCC unroll 4
      for (size_t row = 0; row < kRows; ++row) {
        sums[0][row] = sums[1][row] = Simd::ZeroInt();
      }
      MultiplyKeyTile<kRows, kSteps>(page, digits, g, ahead, sums);
#pragma GCC unroll 4
      for (size_t row = 0; row < kRows; ++row) {
        take(row, 4 * g, sums[0][row]);
        take(row, 32 + 4 * g, sums[1][row]);
      }
    }
  }

  // outputs[row][output] += units[row] * (weights[row] . codes); outputs as ChannelOfOutput says.
  template <size_t kRows>
  static void MultiplyValues(const PageArgs& page,
                             const uint8_t (*weights)[kPageTokens],
                             const float* units,
                             float* outputs) {
    constexpr size_t kVectors = kLanes / 8;  // Of eight rows of words: 32 channels each.
    const size_t stride = PaddedValueDim(page.value_dim);
    for (size_t vector = 0; vector < page.value_dim / 32; vector += kVectors) {
      // The last tile of an odd number of vectors reads on into the metadata, whose 512 bytes are
      // one more vector; nobody takes those outputs.
      const std::byte* words = page.block + kPageTokens / 4 * page.key_dim + vector * 512;
      const std::byte* ahead = page.ahead + (words - page.block);
      float* out = outputs + vector / 2 * 64 + vector % 2 * 8;
      MultiplyValueTile<kRows, 0>(words, ahead, weights, units, stride, out);
      if constexpr (kPairs == 1) {
        MultiplyValueTile<kRows, 1>(words, ahead + 256, weights, units, stride, out + 32);
      }
    }
  }

 private:
  // kLanes tokens of each row half, from `g` on. Fetches a line for each one that it reads.
  template <size_t kRows, size_t kSteps>
  __attribute__((always_inline)) static void MultiplyKeyTile(const PageArgs& page,
                                                             const int32_t* digits,
                                                             size_t g,
                                                             const std::byte*& ahead,
                                                             Int (&sums)[2][kRows]) {
    const Int low = Simd::SetInt(0x03030303);
    const Int high = Simd::SetInt(0x0c0c0c0c);
    const size_t num_steps = page.key_dim / 32;
    for (size_t step = 0; step < num_steps; step += kSteps) {
      for (size_t t = 0; t < 4; ++t) {
        Int words[kSteps];
        LoadKeyWords(page, step, g, t, words);
#pragma GCC unroll 4
        for (size_t i = 0; i < kSteps; ++i) {
          if (i % (16 / kLanes) == 0) {
            Prefetch(ahead);
            ahead += 64;
          }
          const Int x = words[i];
          const Int y = Simd::ShiftRight4(x);
          const Int codes[2][2] = {{Simd::And(x, low), Simd::And(x, high)},
                                   {Simd::And(y, low), Simd::And(y, high)}};
          const int32_t* q = digits + ((step + i) * 4 + t) * 2 * kChunkRows;
#pragma GCC unroll 4
          for (size_t row = 0; row < kRows; ++row) {
            const Int first = Simd::SetInt(q[row]);
            const Int second = Simd::SetInt(q[kChunkRows + row]);
            sums[0][row] = Simd::Dot(sums[0][row], codes[0][0], first, codes[1][0], second);
            sums[1][row] = Simd::Dot(sums[1][row], codes[0][1], first, codes[1][1], second);
          }
        }
      }
    }
  }

  // Lane 4 l + mt of words[i] is the word of channel step `step + i`, token tile mt, lane
  // 4 (g + l) + t of the page format.
  template <size_t kSteps>
  static void LoadKeyWords(
      const PageArgs& page, size_t step, size_t g, size_t t, Int (&words)[kSteps]) {
    const std::byte* codes = page.block + g * 64 + t * 16;
    const size_t num_steps = page.key_dim / 32;
    if constexpr (kSteps == 4) {
      Simd::GatherQuads(codes + step / 4 * 512, 64, num_steps / 4 * 512, words);
    } else if constexpr (kSteps == 2) {
      Simd::GatherPairs(codes, 64, 512, words);
    } else {
      alignas(64) uint32_t gathered[kLanes];
      for (size_t lane = 0; lane < kLanes; ++lane) {
        const size_t word = lane % 4 * num_steps + step;
        std::memcpy(gathered + lane, codes + lane / 4 * 64 + word / 4 * 512 + word % 4 * 4, 4);
      }
      words[0] = Simd::LoadInt(gathered);
    }
  }

  // The channels of word pairs (channel tile's lowest bit) [kFirst, kFirst + kPairs) of kLanes rows
  // of words.
  template <size_t kRows, size_t kFirst>
  static void MultiplyValueTile(const std::byte* rows,
                                const std::byte* ahead,
                                const uint8_t (*weights)[kPageTokens],
                                const float* units,
                                size_t stride,
                                float* out) {
    const Int low = Simd::SetInt(0x03030303);
    const Int high = Simd::SetInt(0x0c0c0c0c);
    Int sums[kPairs][2][kRows];
#pragma GCC unroll 2
    for (size_t pair = 0; pair < kPairs; ++pair) {
#pragma GCC unroll 4
      for (size_t row = 0; row < kRows; ++row) {
        sums[pair][0][row] = sums[pair][1][row] = Simd::ZeroInt();
      }
    }
    for (size_t t = 0; t < 4; ++t) {
      Int words[4];  // [pair][kk]
      Simd::GatherQuads(rows + 16 * t, 256, 64, words);
#pragma GCC unroll 2
      for (size_t kk = 0; kk < 2; ++kk) {
#pragma GCC unroll 2
        for (size_t pair = 0; pair < kPairs; ++pair) {
          if (kk < kPairs) {
            Prefetch(ahead + ((t * kPairs + kk) * kPairs + pair) * 64);
          }
          const Int x = words[2 * (kFirst + pair) + kk];
          const Int y = Simd::ShiftRight4(x);
          const Int codes[2][2] = {{Simd::And(x, low), Simd::And(x, high)},
                                   {Simd::And(y, low), Simd::And(y, high)}};
#pragma GCC unroll 4
          for (size_t row = 0; row < kRows; ++row) {
            const uint8_t* at = weights[row] + 32 * kk + 4 * t;
            const Int first = Simd::SetInt(LoadWord(at));
            const Int second = Simd::SetInt(LoadWord(at + 16));
            Int(&sum)[2][kRows] = sums[pair];
            sum[0][row] = Simd::Dot(sum[0][row], first, codes[0][0], second, codes[1][0]);
            sum[1][row] = Simd::Dot(sum[1][row], first, codes[0][1], second, codes[1][1]);
          }
        }
      }
    }
#pragma GCC unroll 2
    for (size_t pair = 0; pair < kPairs; ++pair) {
#pragma GCC unroll 4
      for (size_t row = 0; row < kRows; ++row) {
        float* to = out + row * stride + pair * 32;
        const Float unit = Simd::Set(units[row]);
        const Float quarter = Simd::Set(units[row] * 0.25f);
        AddScaled(sums[pair][0][row], unit, to);
        AddScaled(sums[pair][1][row], quarter, to + 16);
      }
    }
  }

  static void AddScaled(Int sums, Float unit, float* to) {
    Simd::Store(Simd::MulAdd(Simd::ToFloat(sums), unit, Simd::Load(to)), to);
  }

  // To the second cache: the first one is full.
  static void Prefetch(const std::byte* at) {
    __builtin_prefetch(at, 0, 2);
  }

  static int32_t LoadWord(const uint8_t* bytes) {
    int32_t word;
    std::memcpy(&word, bytes, sizeof(word));
    return word;
  }
};

}  // namespace crumb::cpu
