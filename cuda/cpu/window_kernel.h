// SPDX-License-Identifier: Apache-2.0
//
// Attention to a tile of BF16 rows, over the vector type `Simd` that the including file has
// defined. Scores are dot products of kRows queries with kTokens keys at a time, whose sums end in
// one vector; values are added row by row to four queries' outputs in registers.
#pragma once

#include <cstddef>

#include "cuda/cpu/split_attention_kernel.h"

namespace crumb::cpu {

template <typename Simd>
class WindowKernel {
 public:
  static void AttendWindow(size_t key_dim,
                           size_t value_dim,
                           const WindowArgs& args,
                           ChunkState& state) {
    alignas(64) float scores[kChunkRows][kWindowTile];
    alignas(64) float decay[ChunkState::kMaxLanes];
    for (size_t token = 0; token < args.num_tokens; token += kTokens) {
      for (size_t row = 0; row < kChunkRows; row += kRows) {
        MultiplyKeys(key_dim, args, row, token, scores);
      }
    }
    for (size_t row = 0; row < kChunkRows; ++row) {
      decay[row] = MakeWeights(args, row, scores[row], state);
    }
    size_t channel = 0;
    for (; channel + 4 * kLanes <= value_dim; channel += 4 * kLanes) {
      AddValues<4>(value_dim, args, channel, scores, decay);
    }
    for (; channel < value_dim; channel += kLanes) {
      AddValues<1>(value_dim, args, channel, scores, decay);
    }
  }

 private:
  using Float = typename Simd::Float;
  static constexpr size_t kLanes = Simd::kLanes;
  static constexpr size_t kRows = kLanes == 16 ? 4 : 2;
  static constexpr size_t kTokens = kLanes / kRows;

  // Raw scores of kRows queries and kTokens keys; past the last token, the last one's again.
  static void MultiplyKeys(size_t key_dim,
                           const WindowArgs& args,
                           size_t row,
                           size_t token,
                           float (&scores)[kChunkRows][kWindowTile]) {
    const BFloat16* keys[kTokens];
    for (size_t i = 0; i < kTokens; ++i) {
      const size_t last = args.num_tokens - 1;
      keys[i] = args.keys + (token + i < last ? token + i : last) * key_dim;
    }
    const float* queries = args.queries + row * key_dim;
    Float sums[kLanes];
#pragma GCC unroll 16
    for (size_t i = 0; i < kLanes; ++i) {
      sums[i] = Simd::Zero();
    }
    for (size_t channel = 0; channel < key_dim; channel += kLanes) {
      Float x[kTokens];
#pragma GCC unroll 4
      for (size_t i = 0; i < kTokens; ++i) {
        x[i] = Simd::LoadBf16(keys[i] + channel);
      }
#pragma GCC unroll 4
      for (size_t r = 0; r < kRows; ++r) {
        const Float q = Simd::Load(queries + r * key_dim + channel);
#pragma GCC unroll 4
        for (size_t i = 0; i < kTokens; ++i) {
          sums[r * kTokens + i] = Simd::MulAdd(q, x[i], sums[r * kTokens + i]);
        }
      }
    }
    alignas(64) float lanes[kLanes];
    Simd::Store(Simd::SumEach(sums), lanes);
#pragma GCC unroll 4
    for (size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (size_t i = 0; i < kTokens; ++i) {
        scores[row + r][token + i] = lanes[r * kTokens + i];
      }
    }
  }

  // Turns a row's raw scores into probabilities and adds them to its sum. Returns what its old
  // outputs are worth now.
  static float MakeWeights(const WindowArgs& args, size_t row, float* scores, ChunkState& state) {
    const size_t visible = args.visible[row];
    if (visible == 0) {
      for (size_t i = 0; i < kWindowTile; ++i) {
        scores[i] = 0;
      }
      return 1;
    }
    const Float scale = Simd::Set(args.score_scale);
    for (size_t i = visible; i < kWindowTile; ++i) {
      scores[i] = scores[0];  // Valid for the maximum; its probability is taken away below.
    }
    Float highest = Simd::Set(state.max[row]);
    for (size_t i = 0; i < kWindowTile; i += kLanes) {
      const Float score = Simd::Mul(Simd::Load(scores + i), scale);
      Simd::Store(score, scores + i);
      highest = Simd::Max(highest, score);
    }
    const float max = Simd::ReduceMax(highest);
    for (size_t i = 0; i < kWindowTile; i += kLanes) {
      Simd::Store(Simd::Exp2(Simd::Sub(Simd::Load(scores + i), Simd::Set(max))), scores + i);
    }
    for (size_t i = visible; i < kWindowTile; ++i) {
      scores[i] = 0;
    }
    Float sum = Simd::Zero();
    for (size_t i = 0; i < kWindowTile; i += kLanes) {
      sum = Simd::Add(sum, Simd::Load(scores + i));
    }
    alignas(64) float decay[kLanes];
    Simd::Store(Simd::Exp2(Simd::Set(state.max[row] - max)), decay);
    state.max[row] = max;
    state.sum[row] = state.sum[row] * decay[0] + Simd::ReduceAdd(sum);
    return decay[0];
  }

  // outputs[all rows][kVectors vectors from `channel`] = outputs * decay + weights . values.
  template <size_t kVectors>
  // NOLINTNEXTLINE(readability-function-size): loops over registers.
  static void AddValues(size_t value_dim,
                        const WindowArgs& args,
                        size_t channel,
                        const float (&weights)[kChunkRows][kWindowTile],
                        const float* decay) {
    constexpr size_t kSideBySide = Simd::kRegisters >= 32 ? kChunkRows : 2;
    for (size_t first = 0; first < kChunkRows; first += kSideBySide) {
      Float sums[kSideBySide][kVectors];
      float* out = args.outputs + first * value_dim + channel;
#pragma GCC unroll 4
      for (size_t row = 0; row < kSideBySide; ++row) {
#pragma GCC unroll 4
        for (size_t v = 0; v < kVectors; ++v) {
          sums[row][v] = Simd::Mul(Simd::Load(out + row * value_dim + v * kLanes),
                                   Simd::Set(decay[first + row]));
        }
      }
      for (size_t token = 0; token < args.num_tokens; ++token) {
        const BFloat16* values = args.values + token * value_dim + channel;
        Float x[kVectors];
#pragma GCC unroll 4
        for (size_t v = 0; v < kVectors; ++v) {
          x[v] = Simd::LoadBf16(values + v * kLanes);
        }
#pragma GCC unroll 4
        for (size_t row = 0; row < kSideBySide; ++row) {
          const Float weight = Simd::Set(weights[first + row][token]);
#pragma GCC unroll 4
          for (size_t v = 0; v < kVectors; ++v) {
            sums[row][v] = Simd::MulAdd(weight, x[v], sums[row][v]);
          }
        }
      }
#pragma GCC unroll 4
      for (size_t row = 0; row < kSideBySide; ++row) {
#pragma GCC unroll 4
        for (size_t v = 0; v < kVectors; ++v) {
          Simd::Store(sums[row][v], out + row * value_dim + v * kLanes);
        }
      }
    }
  }
};

}  // namespace crumb::cpu
