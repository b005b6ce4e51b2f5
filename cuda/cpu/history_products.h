// SPDX-License-Identifier: Apache-2.0
//
// The integer products of attention to INT2 pages, over the vector type `Simd` that the
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

#include "cuda/cpu/history_batch.h"
#include "cuda/cpu/history_fetch.h"
#include "cuda/cpu/split_attention_kernel.h"

namespace crumb::cpu {

template <typename Simd>
class HistoryProducts {
  using Float = typename Simd::Float;
  using Int = typename Simd::Int;
  using Batch = HistoryBatch<Simd>;
  using Page = HistoryPage<Simd>;
  using Fetch = HistoryFetch<Simd>;
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

  // Calls f(constant) with rows.count, at least 1.
  template <typename F>
  static void WithCount(const HistoryRows& rows, F f) {
    switch (rows.count) {
      case 1:
        return f(std::integral_constant<size_t, 1>());
      case 2:
        return f(std::integral_constant<size_t, 2>());
      case 3:
        return f(std::integral_constant<size_t, 3>());
      default:
        return f(std::integral_constant<size_t, kChunkRows>());
    }
  }

  // A page's keys and the digits of some rows' queries.
  struct Keys {
    const Batch& batch;
    const Page& page;
    const int32_t* digits;
    const HistoryRows& rows;
  };

  // Products of the first kRows rows' digits with the key codes. Calls take(i, position, sums) for
  // the i-th of the rows and each vector of tokens.
  template <size_t kRows, size_t kSteps, typename Take>
  __attribute__((always_inline)) static void MultiplyKeys(const Keys& keys, Take take) {
    size_t line = 0;
#pragma GCC unroll 2
    for (size_t g = 0; g < 8; g += kQuarters) {
      Int sums[2][kRows];
#pragma GCC unroll 4
      for (size_t row = 0; row < kRows; ++row) {
        sums[0][row] = sums[1][row] = Simd::ZeroInt();
      }
      MultiplyKeyTile<kRows, kSteps>(keys, g, line, sums);
#pragma GCC unroll 4
      for (size_t row = 0; row < kRows; ++row) {
        take(row, 4 * g, sums[0][row]);
        take(row, 32 + 4 * g, sums[1][row]);
      }
    }
  }

  // outputs[row][output] += units[row] * (digits[row] . codes), summed over pages, for kRows rows
  // and one of their digits; outputs as ChannelOfOutput says. kAreFirst: the rows are 0, 1, ...,
  // which the compiler had better know.
  template <size_t kRows, bool kAreFirst>
  static void MultiplyValues(const Batch& batch,
                             const HistoryGroup& group,
                             size_t digit,
                             const HistoryRows& rows) {
    constexpr size_t kVectors = kLanes / 8;  // Of eight rows of words: 32 channels each.
    const Values values{batch.pages + group.first,
                        group.num_pages,
                        kPageTokens / 4 * batch.key_dim,
                        digit,
                        rows,
                        group.units[digit],
                        PaddedValueDim(batch.value_dim)};
    for (size_t vector = 0; vector < batch.value_dim / 32; vector += kVectors) {
      float* out = batch.outputs + vector / 2 * 64 + vector % 2 * 8;
      MultiplyValueTile<kRows, 0, kAreFirst>(values, vector * 512, out);
      if constexpr (kPairs == 1) {
        MultiplyValueTile<kRows, 1, kAreFirst>(values, vector * 512, out + 32);
      }
    }
  }

 private:
  struct Values {
    const Page* pages;
    size_t num_pages;
    size_t offset;  // Of the value codes in a block.
    size_t digit;
    const HistoryRows& rows;
    const float* units;
    size_t stride;  // Of a row's outputs.
  };

  // kLanes tokens of each row half, from `g` on. Fetches a line for each one that it reads,
  // and one of metadata a quarter of the channels.
  template <size_t kRows, size_t kSteps>
  __attribute__((always_inline)) static void MultiplyKeyTile(const Keys& keys,
                                                             size_t g,
                                                             size_t& line,
                                                             Int (&sums)[2][kRows]) {
    const size_t num_steps = keys.batch.key_dim / 32;
    const size_t meta = Fetch::MetaOffset(keys.batch.key_dim, keys.batch.value_dim);
    for (size_t step = 0; step < num_steps; step += kSteps) {
      for (size_t t = 0; t < 4; ++t) {
        Fetch::Ahead(keys.page, meta + line / kSteps % Fetch::kMetaBytes);
        Int words[kSteps];
        LoadKeyWords(num_steps, keys.page.block, step, g, t, words);
#pragma GCC unroll 4
        for (size_t i = 0; i < kSteps; ++i) {
          if (i % (16 / kLanes) == 0) {
            Fetch::Ahead(keys.page, line);
            line += 64;
          }
          Int codes[2][2];
          Unpack(words[i], codes);
          const int32_t* q = keys.digits + ((step + i) * 4 + t) * 2 * kChunkRows;
#pragma GCC unroll 4
          for (size_t row = 0; row < kRows; ++row) {
            const Int first = Simd::SetInt(q[keys.rows.rows[row]]);
            const Int second = Simd::SetInt(q[kChunkRows + keys.rows.rows[row]]);
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
  static void LoadKeyWords(size_t num_steps,
                           const std::byte* block,
                           size_t step,
                           size_t g,
                           size_t t,
                           Int (&words)[kSteps]) {
    const std::byte* codes = block + g * 64 + t * 16;
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
  // of words, `at` bytes into the value codes. The last tile of an odd number of vectors reads on
  // into the metadata, whose 512 bytes are one more vector; nobody takes those outputs.
  template <size_t kRows, size_t kFirst, bool kAreFirst>
  static void MultiplyValueTile(const Values& values, size_t at, float* out) {
    const HistoryRows& rows = kAreFirst ? kFirstRows[kRows] : values.rows;
    Int sums[kPairs][2][kRows];
#pragma GCC unroll 2
    for (size_t pair = 0; pair < kPairs; ++pair) {
#pragma GCC unroll 4
      for (size_t row = 0; row < kRows; ++row) {
        sums[pair][0][row] = sums[pair][1][row] = Simd::ZeroInt();
      }
    }
    for (size_t i = 0; i < values.num_pages; ++i) {
      const Page& page = values.pages[i];
      const std::byte* codes = page.block + values.offset + at;
      const size_t line = values.offset + at + kFirst * 256;
      const uint8_t* digits[kRows];
#pragma GCC unroll 4
      for (size_t row = 0; row < kRows; ++row) {
        digits[row] = page.digits[values.digit][rows.rows[row]];
      }
      for (size_t t = 0; t < 4; ++t) {
        Int words[4];  // [pair][kk]
        Simd::GatherQuads(codes + 16 * t, 256, 64, words);
#pragma GCC unroll 2
        for (size_t kk = 0; kk < 2; ++kk) {
          if (kk < kPairs) {  // As many lines as are read.
            const size_t from = line + (t * kPairs + kk) * kPairs * kCacheLine;
            Fetch::Ahead(page, from);
            Fetch::Ahead(page, from + (kPairs - 1) * kCacheLine);
          }
          MultiplyValueWords<kRows>(words[2 * kFirst + kk], words[2 * (kFirst + kPairs - 1) + kk],
                                    digits, 32 * kk + 4 * t, sums);
        }
      }
    }
#pragma GCC unroll 2
    for (size_t pair = 0; pair < kPairs; ++pair) {
#pragma GCC unroll 4
      for (size_t row = 0; row < kRows; ++row) {
        float* to = out + rows.rows[row] * values.stride + pair * 32;
        const Float unit = Simd::Set(values.units[rows.rows[row]]);
        const Float quarter = Simd::Set(values.units[rows.rows[row]] * 0.25f);
        AddScaled(sums[pair][0][row], unit, to);
        AddScaled(sums[pair][1][row], quarter, to + 16);
      }
    }
  }

  // Adds the products of one word of each pair with the digits of its eight tokens, from `at` on.
  // Where there is one pair, both words are its.
  template <size_t kRows>
  __attribute__((always_inline)) static void MultiplyValueWords(
      Int word0,
      Int word1,
      const uint8_t* const (&digits)[kRows],
      size_t at,
      Int (&sums)[kPairs][2][kRows]) {
    Int codes[kPairs][2][2];
    Unpack(word0, codes[0]);
    if constexpr (kPairs == 2) {
      Unpack(word1, codes[1]);
    }
#pragma GCC unroll 4
    for (size_t row = 0; row < kRows; ++row) {
      const Int first = Simd::SetInt(LoadWord(digits[row] + at));
      const Int second = Simd::SetInt(LoadWord(digits[row] + at + 16));
#pragma GCC unroll 4
      for (size_t i = 0; i < kPairs * 2; ++i) {
        Int& sum = sums[i / 2][i % 2][row];
        sum = Simd::Dot(sum, first, codes[i / 2][0][i % 2], second, codes[i / 2][1][i % 2]);
      }
    }
  }

  // A word's codes [half][row half], the latter in place.
  static void Unpack(Int word, Int (&codes)[2][2]) {
    const Int low = Simd::SetInt(0x03030303);
    const Int high = Simd::SetInt(0x0c0c0c0c);
    const Int shifted = Simd::ShiftRight4(word);
    codes[0][0] = Simd::And(word, low);
    codes[0][1] = Simd::And(word, high);
    codes[1][0] = Simd::And(shifted, low);
    codes[1][1] = Simd::And(shifted, high);
  }

  static void AddScaled(Int sums, Float unit, float* to) {
    Simd::Store(Simd::MulAdd(Simd::ToFloat(sums), unit, Simd::Load(to)), to);
  }

  static int32_t LoadWord(const uint8_t* bytes) {
    int32_t word;
    std::memcpy(&word, bytes, sizeof(word));
    return word;
  }
};

}  // namespace crumb::cpu
