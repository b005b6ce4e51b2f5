// SPDX-License-Identifier: Apache-2.0
//
// The integer products of attention to one INT2 page, over the vector type `Simd` that the
// including file has defined. Codes are read from the head block as they lie; packed words are
// transposed in registers so that a vector's lanes are tokens (keys) or channels (values), and
// unpacked once for all of a chunk's rows.
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

#include "cuda/cpu/split_attention_kernel.h"

namespace crumb::cpu {

// Rows [first, first + kRows) of a chunk.
template <typename Simd>
class HistoryProducts {
 public:
  // products[row][position] (* 256 if `add`) += digit . code.
  template <size_t kRows>
  static void MultiplyKeys(const PageArgs& page,
                           const int32_t* digits,
                           size_t first,
                           bool add,
                           int32_t (*products)[kPageTokens]) {
    const size_t num_steps = page.key_dim / 32;
    const KeyArgs args{page, digits + first * kQueryWords, num_steps};
    for (size_t g = 0; g < 8; g += kQuarters) {
      Int sums[2][kRows][kQuarters];
#pragma GCC unroll 4
      for (size_t i = 0; i < kQuarters; ++i) {
        if (num_steps % 4 == 0) {
          MultiplyKeyRow<kRows, 4>(args, g + i, i, sums);
        } else if (num_steps == 2) {
          MultiplyKeyRow<kRows, 2>(args, g + i, i, sums);
        } else {
          MultiplyKeyRow<kRows, 1>(args, g + i, i, sums);
        }
      }
#pragma GCC unroll 4
      for (size_t row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
        for (size_t half = 0; half < 2; ++half) {
          int32_t* to = products[first + row] + 32 * half + 4 * g;
          Int sum = Simd::SumQuarters(sums[half][row]);
          if (add) {
            sum = Simd::AddInt(sum, Simd::ShiftLeft8(Simd::LoadInt(to)));
          }
          Simd::StoreInt(sum, to);
        }
      }
    }
  }

  // outputs[row][output] += units[row] * (weights[row] . codes); outputs as ChannelOfOutput says.
  template <size_t kRows>
  static void MultiplyValues(const PageArgs& page,
                             const uint8_t (*weights)[kPageTokens],
                             const float* units,
                             size_t first,
                             float* outputs) {
    constexpr size_t kVectors = kLanes / 8;  // Of eight rows of words: 32 channels each.
    const size_t stride = PaddedValueDim(page.value_dim);
    for (size_t vector = 0; vector < page.value_dim / 32; vector += kVectors) {
      // The last tile of an odd number of vectors reads on into the metadata, whose 512 bytes are
      // one more vector; nobody takes those outputs.
      const std::byte* words = page.block + kPageTokens / 4 * page.key_dim + vector * 512;
      const std::byte* ahead = page.ahead + (words - page.block);
      float* out = outputs + first * stride + vector / 2 * 64 + vector % 2 * 8;
      MultiplyTile<kRows, 0>(words, ahead, weights + first, units + first, stride, out);
      MultiplyTile<kRows, 1>(words, ahead + 256 * kVectors, weights + first, units + first, stride,
                             out + 32);
    }
  }

 private:
  using Float = typename Simd::Float;
  using Int = typename Simd::Int;
  static constexpr size_t kLanes = Simd::kLanes;
  static constexpr size_t kParts = 16 / kLanes;    // Vectors of a 64-byte row of words.
  static constexpr size_t kQuarters = kLanes / 4;  // Groups of four lanes in a vector.

  struct KeyArgs {
    const PageArgs& page;
    const int32_t* digits;
    size_t num_steps;
  };

  // sums[half][row][at]: quarters of the products with the tokens of g, four to each t.
  template <size_t kRows, size_t kSteps>
  static void MultiplyKeyRow(const KeyArgs& args,
                             size_t g,
                             size_t at,
                             Int (&sums)[2][kRows][kQuarters]) {
    const Int low = Simd::SetInt(0x03030303);
    const Int high = Simd::SetInt(0x0c0c0c0c);
    Int sum[2][kRows];
#pragma GCC unroll 4
    for (size_t row = 0; row < kRows; ++row) {
      sum[0][row] = sum[1][row] = Simd::ZeroInt();
    }
    for (size_t step = 0; step < args.num_steps; step += kSteps) {
      Int words[kSteps][kParts];
      LoadKeyWords(args, step, g, words);
      const std::byte* ahead = args.page.ahead + (g * args.num_steps + step) * 64;
#pragma GCC unroll 4
      for (size_t i = 0; i < kSteps; ++i) {
        Prefetch(ahead + i * 64);
#pragma GCC unroll 2
        for (size_t part = 0; part < kParts; ++part) {
          const Int x = words[i][part];
          const Int y = Simd::ShiftRight4(x);
          const Int codes[2][2] = {{Simd::And(x, low), Simd::And(x, high)},
                                   {Simd::And(y, low), Simd::And(y, high)}};
          const int32_t* q =
              args.digits + (step + i) * 2 * kChunkRows * kQueryWords + part * kLanes;
#pragma GCC unroll 4
          for (size_t row = 0; row < kRows; ++row) {
            const Int first = Simd::LoadInt(q + row * kQueryWords);
            const Int second = Simd::LoadInt(q + (kChunkRows + row) * kQueryWords);
            sum[0][row] = Simd::Dot(sum[0][row], codes[0][0], first, codes[1][0], second);
            sum[1][row] = Simd::Dot(sum[1][row], codes[0][1], first, codes[1][1], second);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (size_t row = 0; row < kRows; ++row) {
      sums[0][row][at] = sum[0][row];
      sums[1][row][at] = sum[1][row];
    }
  }

  // Lane 4 t + mt of words[i] is the word of channel step `step + i`, token tile mt, lane 4 g + t.
  template <size_t kSteps>
  static void LoadKeyWords(const KeyArgs& args,
                           size_t step,
                           size_t g,
                           Int (&words)[kSteps][kParts]) {
    const std::byte* codes = args.page.block + g * 64;
    if constexpr (kSteps == 4) {
      const std::byte* rows[4];
#pragma GCC unroll 4
      for (size_t mt = 0; mt < 4; ++mt) {
        rows[mt] = codes + (mt * args.num_steps + step) / 4 * 512;
      }
      Simd::TransposeQuads(rows, words);
    } else if constexpr (kSteps == 2) {
      Simd::TransposePairs(codes, codes + 512, words);
    } else {
      alignas(64) uint32_t gathered[16];
      for (size_t mt = 0; mt < 4; ++mt) {
        const size_t word = mt * args.num_steps + step;
        for (size_t t = 0; t < 4; ++t) {
          std::memcpy(gathered + 4 * t + mt, codes + word / 4 * 512 + t * 16 + word % 4 * 4, 4);
        }
      }
      for (size_t part = 0; part < kParts; ++part) {
        words[0][part] = Simd::LoadInt(gathered + part * kLanes);
      }
    }
  }

  // The channels of word pair kPair (channel tile's lowest bit) of kLanes rows of words.
  template <size_t kRows, size_t kPair>
  static void MultiplyTile(const std::byte* rows,
                           const std::byte* ahead,
                           const uint8_t (*weights)[kPageTokens],
                           const float* units,
                           size_t stride,
                           float* out) {
    const Int low = Simd::SetInt(0x03030303);
    const Int high = Simd::SetInt(0x0c0c0c0c);
    Int words[8];
    Simd::template TransposeTile<kPair>(rows, words);
    Int sums[2][kRows];
#pragma GCC unroll 4
    for (size_t row = 0; row < kRows; ++row) {
      sums[0][row] = sums[1][row] = Simd::ZeroInt();
    }
#pragma GCC unroll 8
    for (size_t i = 0; i < 8; ++i) {  // 4 * kk + t
      if (i % kParts == 0) {
        Prefetch(ahead + i / kParts * 64);
      }
      const Int x = words[i];
      const Int y = Simd::ShiftRight4(x);
      const Int codes[2][2] = {{Simd::And(x, low), Simd::And(x, high)},
                               {Simd::And(y, low), Simd::And(y, high)}};
#pragma GCC unroll 4
      for (size_t row = 0; row < kRows; ++row) {
        const uint8_t* at = weights[row] + i / 4 * 32 + i % 4 * 4;
        const Int first = Simd::SetInt(LoadWord(at));
        const Int second = Simd::SetInt(LoadWord(at + 16));
        sums[0][row] = Simd::Dot(sums[0][row], first, codes[0][0], second, codes[1][0]);
        sums[1][row] = Simd::Dot(sums[1][row], first, codes[0][1], second, codes[1][1]);
      }
    }
#pragma GCC unroll 4
    for (size_t row = 0; row < kRows; ++row) {
      float* to = out + row * stride;
      const Float unit = Simd::Set(units[row]);
      const Float quarter = Simd::Set(units[row] * 0.25f);
      Simd::Store(Simd::MulAdd(Simd::ToFloat(sums[0][row]), unit, Simd::Load(to)), to);
      Simd::Store(Simd::MulAdd(Simd::ToFloat(sums[1][row]), quarter, Simd::Load(to + 16)), to + 16);
    }
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
