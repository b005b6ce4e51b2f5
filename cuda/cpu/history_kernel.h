// SPDX-License-Identifier: Apache-2.0
//
// Attention to one INT2 page, over the vector type `Simd` that the including file has defined.
//
// Codes enter products as the exact integers 0..3; queries and probabilities as fixed point of one
// or two base-256 digits, so that a product sum is whole numbers throughout and no element is ever
// made a float. Scale and minimum of the rows are folded in outside:
//
//   score  = scale_k * (q . code) + min_k * sum(q)
//   output = sum((p * scale_v) * code) + sum(p * min_v)
//
// Two digits (16 bits) where they can be seen, one where they cannot: a page none of whose tokens
// has as much as kFineShare of the probability so far is read with digit 0 of q and eight bits of
// p * scale_v. See docs/decisions/0020-digits-by-share.md for what that costs.
//
// Cache lines of a page to come are asked for along the way, its key codes while keys are
// multiplied, its metadata while weights are made, its value codes while values are multiplied.
//
// Odd pairs of bits are masked in place, not shifted: they enter four times too large, which their
// scale takes back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cuda/cpu/split_attention_kernel.h"

namespace crumb::cpu {

inline constexpr float kFineShare = 1.0f / 256;

// The last digit of p is rounded up by these, spread evenly over [0, 1): many small probabilities
// then keep their sum, which rounding to nearest would make 0.
struct RoundingOffsets {
  alignas(64) float values[kPageTokens];
};
constexpr RoundingOffsets MakeRoundingOffsets() {
  RoundingOffsets offsets{};
  for (uint32_t i = 0; i < kPageTokens; ++i) {
    uint32_t reversed = 0;
    for (uint32_t bit = 0; bit < 6; ++bit) {
      reversed |= ((i >> bit) & 1u) << (5 - bit);
    }
    offsets.values[i] = (static_cast<float>(reversed) + 0.5f) / kPageTokens;
  }
  return offsets;
}
inline constexpr RoundingOffsets kRoundingOffsets = MakeRoundingOffsets();

template <typename Simd>
class HistoryKernel {
 public:
  static void Transpose(size_t key_dim,
                        size_t value_dim,
                        const std::byte* block,
                        TransposedPage& page) {
    TransposeKeys(block, key_dim / 32, page.keys);
    const std::byte* values = block + kPageTokens * key_dim / 4;
    TransposeValues(values, value_dim / 32, page.values);
    const std::byte* meta = values + kPageTokens * value_dim / 4;
    Simd::SplitMeta(meta, page.key_scale, page.key_min);
    Simd::SplitMeta(meta + size_t{4} * kPageTokens, page.value_scale, page.value_min);
    Float highest = Simd::Set(0);
    for (size_t i = 0; i < kPageTokens; i += kLanes) {
      highest = Simd::Max(Simd::Load(page.value_scale + i), highest);
      if (i >= kPageTokens / 2) {
        Simd::Store(Simd::Mul(Simd::Load(page.key_scale + i), Simd::Set(0.25f)),
                    page.key_scale + i);
      }
    }
    page.max_value_scale = Simd::ReduceMax(highest);
  }

  // NOLINTNEXTLINE(readability-function-size): as the table of functions.
  static void AttendPage(size_t key_dim,
                         size_t value_dim,
                         const TransposedPage& page,
                         const FixedQueries& queries,
                         size_t num_rows,
                         const std::byte* ahead,
                         ChunkState& state,
                         float* outputs) {
    switch (num_rows) {
      case 1:
        return AttendRows<1>(key_dim, value_dim, page, queries, ahead, state, outputs);
      case 2:
        return AttendRows<2>(key_dim, value_dim, page, queries, ahead, state, outputs);
      case 3:
        return AttendRows<3>(key_dim, value_dim, page, queries, ahead, state, outputs);
      default:
        return AttendRows<kChunkRows>(key_dim, value_dim, page, queries, ahead, state, outputs);
    }
  }

 private:
  template <size_t kRows>
  static void AttendRows(size_t key_dim,
                         size_t value_dim,
                         const TransposedPage& page,
                         const FixedQueries& queries,
                         const std::byte* ahead,
                         ChunkState& state,
                         float* outputs) {
    Work work;  // NOLINT(cppcoreguidelines-pro-type-member-init): written before it is read.
    MultiplyKeys<kRows>(page.keys, key_dim / 8, queries.digits[0], false, ahead, work);
    MakeScores<kRows>(page, queries, 0, work);
    const bool fine = AnyShareAbove<kRows>(kFineShare, state, work);
    if (fine) {
      MultiplyKeys<kRows>(page.keys, key_dim / 8, queries.digits[1], true, ahead, work);
      MakeScores<kRows>(page, queries, 1, work);
    }
    MakeWeights<kRows>(page, fine, ahead + 16 * (key_dim + value_dim), state, work);
    const size_t num_tiles = NumValueTiles(value_dim);
    for (size_t tile = 0; tile < num_tiles; tile += kTiles) {
      MultiplyValues<kRows>(page.values + tile * kTileWords, fine ? 2 : 1,
                            ahead + 16 * key_dim + 512 * tile, work,
                            outputs + tile * kValueTileChannels, PaddedValueDim(value_dim));
    }
  }

  using Float = typename Simd::Float;
  using Int = typename Simd::Int;
  static constexpr size_t kLanes = Simd::kLanes;
  static constexpr size_t kTileWords = size_t{8} * 16;
  // Vectors that are multiplied side by side, as registers allow.
  static constexpr size_t kSets = Simd::kRegisters >= 32 ? 2 : 1;
  static constexpr size_t kTiles = Simd::kRegisters >= 32 ? 2 : 1;

  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init)
  struct alignas(64) Work {
    int32_t products[kChunkRows][kPageTokens];
    float scores[kChunkRows][kPageTokens];
    uint8_t weights[2][kChunkRows][kPageTokens];  // p * scale_v: digits, by token position.
    float highest[ChunkState::kMaxLanes] = {};    // Of the page's scores.
    float decay[ChunkState::kMaxLanes];           // 2^(old max - new max).
    float weight_unit[ChunkState::kMaxLanes];     // What 1 of the last digit is worth.
  };

  // NOLINTNEXTLINE(readability-function-size): one branch a shape.
  static void TransposeKeys(const std::byte* codes, size_t num_steps, uint32_t* out) {
    if (num_steps == 2) {
      for (size_t half = 0; half < 2; ++half) {  // g in 4 * half + 0..3; vector 0 and 1 of each.
        const void* rows[8];
        for (size_t r = 0; r < 8; ++r) {
          rows[r] = codes + (r % 2 * 8 + half * 4 + r / 2) * 64;
        }
        Simd::TransposePairs(rows, out + 16 * half, 32);
      }
      return;
    }
    alignas(64) uint32_t gathered[16][16];
    for (size_t half = 0; half < 2; ++half) {
      for (size_t step = 0; step < num_steps; step += 4) {
        const void* rows[16];  // (g, mt): four steps of each lane's t.
        for (size_t r = 0; r < 16; ++r) {
          const size_t g = half * 4 + r / 4;
          const size_t word = r % 4 * num_steps + step;
          if (num_steps % 4 == 0) {
            rows[r] = codes + (word / 4 * 8 + g) * 64;
            continue;
          }
          GatherWords(codes, word, g, gathered[r], num_steps - step);
          rows[r] = gathered[r];
        }
        if (num_steps - step >= 4) {
          Simd::TransposeWords(rows, out + step * 4 * 32 + 16 * half, 32);
          continue;
        }
        alignas(64) uint32_t last[16][16];
        Simd::TransposeWords(rows, last[0], 16);
        for (size_t i = 0; i < (num_steps - step) * 4; ++i) {
          std::memcpy(out + (step * 4 + i) * 32 + 16 * half, last[i], 64);
        }
      }
    }
  }

  // Words `word` and on, at most four, of lanes 4 * g + t: to[4 * t + i].
  static void GatherWords(
      const std::byte* codes, size_t word, size_t g, uint32_t* to, size_t num_words) {
    for (size_t t = 0; t < 4; ++t) {
      for (size_t i = 0; i < 4; ++i) {
        const size_t w = word + i;
        const size_t from = (w / 4 * 32 + 4 * g + t) * 16 + w % 4 * 4;
        to[4 * t + i] = 0;
        if (i < num_words) {
          std::memcpy(to + 4 * t + i, codes + from, 4);
        }
      }
    }
  }

  static void TransposeValues(const std::byte* codes, size_t num_vectors, uint32_t* out) {
    alignas(64) static constexpr uint32_t kNoCodes[16] = {};
    for (size_t vector = 0; vector < num_vectors; vector += 2) {
      const void* rows[16];
      for (size_t r = 0; r < 16; ++r) {
        const bool there = vector + r / 8 < num_vectors;
        rows[r] = there ? static_cast<const void*>(codes + (vector * 8 + r) * 64) : kNoCodes;
      }
      Simd::TransposeWords(rows, out + vector * kTileWords, 16);
    }
  }

  // products[row][position] (* 256 if `add`) += digit . code.
  template <size_t kRows>
  // NOLINTNEXTLINE(readability-function-size): loops over registers.
  static void MultiplyKeys(const uint32_t* keys,
                           size_t num_words,
                           const int32_t* digits,
                           bool add,
                           const std::byte* ahead,
                           Work& work) {
    const Int low = Simd::SetInt(0x03030303);
    const Int high = Simd::SetInt(0x0c0c0c0c);
    for (size_t position = 0; position < 32; position += kSets * kLanes) {
      Int sums[kSets][2][kRows];
#pragma GCC unroll 2
      for (size_t set = 0; set < kSets; ++set) {
#pragma GCC unroll 4
        for (size_t row = 0; row < kRows; ++row) {
          int32_t* from = work.products[row] + position + set * kLanes;
          sums[set][0][row] = add ? Simd::ShiftLeft8(Simd::LoadInt(from)) : Simd::ZeroInt();
          sums[set][1][row] = add ? Simd::ShiftLeft8(Simd::LoadInt(from + 32)) : Simd::ZeroInt();
        }
      }
      for (size_t word = 0; word < num_words; ++word) {
        const int32_t* q = digits + word * 2 * kChunkRows;
        Prefetch(ahead + 128 * word, 2);
#pragma GCC unroll 2
        for (size_t set = 0; set < kSets; ++set) {
          const Int x = Simd::LoadInt(keys + word * 32 + position + set * kLanes);
          const Int y = Simd::ShiftRight4(x);
          const Int codes[2][2] = {{Simd::And(x, low), Simd::And(x, high)},
                                   {Simd::And(y, low), Simd::And(y, high)}};
#pragma GCC unroll 4
          for (size_t row = 0; row < kRows; ++row) {
            const Int first = Simd::SetInt(q[row]);
            const Int second = Simd::SetInt(q[kChunkRows + row]);
            sums[set][0][row] = Simd::Dot(sums[set][0][row], codes[0][0], first);
            sums[set][1][row] = Simd::Dot(sums[set][1][row], codes[0][1], first);
            sums[set][0][row] = Simd::Dot(sums[set][0][row], codes[1][0], second);
            sums[set][1][row] = Simd::Dot(sums[set][1][row], codes[1][1], second);
          }
        }
      }
#pragma GCC unroll 2
      for (size_t set = 0; set < kSets; ++set) {
#pragma GCC unroll 4
        for (size_t row = 0; row < kRows; ++row) {
          int32_t* to = work.products[row] + position + set * kLanes;
          Simd::StoreInt(sums[set][0][row], to);
          Simd::StoreInt(sums[set][1][row], to + 32);
        }
      }
    }
  }

  // `digit`: the last one that the products hold.
  template <size_t kRows>
  static void MakeScores(const TransposedPage& page,
                         const FixedQueries& queries,
                         size_t digit,
                         Work& work) {
    for (size_t row = 0; row < kRows; ++row) {
      const Float unit = Simd::Set(queries.scale[row] * (digit == 0 ? 256.0f : 1.0f));
      const Float sum = Simd::Set(queries.scale[row] * queries.sums[digit][row]);
      Float highest = Simd::Set(-__builtin_inff());
#pragma GCC unroll 4
      for (size_t i = 0; i < kPageTokens; i += kLanes) {
        const Float product = Simd::ToFloat(Simd::LoadInt(work.products[row] + i));
        const Float score = Simd::MulAdd(Simd::Mul(product, unit), Simd::Load(page.key_scale + i),
                                         Simd::Mul(sum, Simd::Load(page.key_min + i)));
        Simd::Store(score, work.scores[row] + i);
        highest = Simd::Max(highest, score);
      }
      work.highest[row] = Simd::ReduceMax(highest);
    }
  }

  // Whether a token of the page has more than `share` of some row's probability before the page.
  template <size_t kRows>
  static bool AnyShareAbove(float share, const ChunkState& state, const Work& work) {
    alignas(64) float growth[ChunkState::kMaxLanes];
    const Float difference = Simd::Sub(Simd::Load(work.highest), Simd::Load(state.max));
    Simd::Store(Simd::Exp2(difference), growth);
    bool any = false;
    for (size_t row = 0; row < kRows; ++row) {
      any |= !(growth[row] <= share * state.sum[row]);  // At the beginning: NaN, so true.
    }
    return any;
  }

  // Probabilities against the new maximum; their sums into the state, their digits into work.
  template <size_t kRows>
  static void MakeWeights(const TransposedPage& page,
                          bool fine,
                          const std::byte* ahead,
                          ChunkState& state,
                          Work& work) {
    const Float old_max = Simd::Load(state.max);
    const Float max = Simd::Max(old_max, Simd::Load(work.highest));
    const Float decay = Simd::Exp2(Simd::Sub(old_max, max));
    const Float largest =
        Simd::Max(Simd::Set(1e-30f), Simd::Mul(Simd::Exp2(Simd::Sub(Simd::Load(work.highest), max)),
                                               Simd::Set(page.max_value_scale)));
    const float num_units = fine ? 254.0f * 256.0f : 254.0f;
    alignas(64) float units_per_weight[ChunkState::kMaxLanes];
    Simd::Store(Simd::Div(Simd::Set(num_units), largest), units_per_weight);
    Simd::Store(Simd::Mul(largest, Simd::Set(1.0f / num_units)), work.weight_unit);
    Simd::Store(decay, work.decay);
    Simd::Store(max, state.max);
    for (size_t row = 0; row < kRows; ++row) {
      const Float row_max = Simd::Set(state.max[row]);
      const Float units = Simd::Set(units_per_weight[row]);
      Prefetch(ahead + 128 * row, 2);
      Float sum = Simd::Zero();
      Float offset = Simd::Zero();
#pragma GCC unroll 4
      for (size_t i = 0; i < kPageTokens; i += kLanes) {
        const Float p = Simd::Exp2(Simd::Sub(Simd::Load(work.scores[row] + i), row_max));
        sum = Simd::Add(sum, p);
        offset = Simd::MulAdd(p, Simd::Load(page.value_min + i), offset);
        const Float weight = Simd::Mul(p, Simd::Load(page.value_scale + i));
        const Int digits =
            Simd::Truncate(Simd::MulAdd(weight, units, Simd::Load(kRoundingOffsets.values + i)));
        if (fine) {
          Simd::StoreBytes(Simd::ShiftRight8(digits), work.weights[0][row] + i);
          Simd::StoreBytes(digits, work.weights[1][row] + i);
        } else {
          Simd::StoreBytes(digits, work.weights[0][row] + i);
        }
      }
      state.sum[row] = state.sum[row] * work.decay[row] + Simd::ReduceAdd(sum);
      state.offset[row] = state.offset[row] * work.decay[row] + Simd::ReduceAdd(offset);
    }
  }

  // outputs[row][tile channels] = outputs * decay + weights . codes, for kTiles tiles.
  template <size_t kRows>
  // NOLINTNEXTLINE(readability-function-size): loops over registers.
  static void MultiplyValues(const uint32_t* values,
                             size_t num_digits,
                             const std::byte* ahead,
                             const Work& work,
                             float* outputs,
                             size_t stride) {
    const Int low = Simd::SetInt(0x03030303);
    const Int high = Simd::SetInt(0x0c0c0c0c);
    for (size_t lane = 0; lane < 16; lane += kLanes) {
      Int sums[kTiles][2][kRows];
#pragma GCC unroll 2
      for (size_t tile = 0; tile < kTiles; ++tile) {
#pragma GCC unroll 4
        for (size_t row = 0; row < kRows; ++row) {
          sums[tile][0][row] = Simd::ZeroInt();
          sums[tile][1][row] = Simd::ZeroInt();
        }
      }
      for (size_t digit = 0; digit < num_digits; ++digit) {
        for (size_t i = 0; i < 8; ++i) {  // 4 * kk + t
          const size_t at = i / 4 * 32 + i % 4 * 4;
          Prefetch(ahead + 64 * kTiles * i, kTiles);
#pragma GCC unroll 2
          for (size_t tile = 0; tile < kTiles; ++tile) {
            const Int x = Simd::LoadInt(values + tile * kTileWords + i * 16 + lane);
            const Int y = Simd::ShiftRight4(x);
            const Int codes[2][2] = {{Simd::And(x, low), Simd::And(x, high)},
                                     {Simd::And(y, low), Simd::And(y, high)}};
#pragma GCC unroll 4
            for (size_t row = 0; row < kRows; ++row) {
              const uint8_t* weights = work.weights[digit][row] + at;
              const Int first = Simd::SetInt(LoadWord(weights));
              const Int second = Simd::SetInt(LoadWord(weights + 16));
              sums[tile][0][row] = Simd::Dot(sums[tile][0][row], first, codes[0][0]);
              sums[tile][1][row] = Simd::Dot(sums[tile][1][row], first, codes[0][1]);
              sums[tile][0][row] = Simd::Dot(sums[tile][0][row], second, codes[1][0]);
              sums[tile][1][row] = Simd::Dot(sums[tile][1][row], second, codes[1][1]);
            }
          }
        }
        if (digit + 1 < num_digits) {
#pragma GCC unroll 2
          for (size_t tile = 0; tile < kTiles; ++tile) {
#pragma GCC unroll 4
            for (size_t row = 0; row < kRows; ++row) {
              sums[tile][0][row] = Simd::ShiftLeft8(sums[tile][0][row]);
              sums[tile][1][row] = Simd::ShiftLeft8(sums[tile][1][row]);
            }
          }
        }
      }
#pragma GCC unroll 4
      for (size_t row = 0; row < kRows; ++row) {
        const Float decay = Simd::Set(work.decay[row]);
        const Float units[2] = {Simd::Set(work.weight_unit[row]),
                                Simd::Set(work.weight_unit[row] * 0.25f)};
#pragma GCC unroll 2
        for (size_t tile = 0; tile < kTiles; ++tile) {
#pragma GCC unroll 2
          for (size_t half = 0; half < 2; ++half) {
            float* out = outputs + row * stride + tile * kValueTileChannels + half * 16 + lane;
            Simd::Store(Simd::MulAdd(Simd::ToFloat(sums[tile][half][row]), units[half],
                                     Simd::Mul(Simd::Load(out), decay)),
                        out);
          }
        }
      }
    }
  }

  // To the second cache: the first one is full.
  static void Prefetch(const std::byte* at, size_t num_lines) {
    for (size_t i = 0; i < num_lines; ++i) {
      __builtin_prefetch(at + 64 * i, 0, 2);
    }
  }

  static int32_t LoadWord(const uint8_t* bytes) {
    int32_t word;
    std::memcpy(&word, bytes, sizeof(word));
    return word;
  }
};

}  // namespace crumb::cpu
