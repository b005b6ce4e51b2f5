// SPDX-License-Identifier: Apache-2.0
//
// Limit: 32,768 multiply-adds of K and as many of V a tile of 64 tokens, 32 an instruction, so
// about 2,048 cycles, against 32 KiB of memory: memory wins on every machine that we know. The next
// tile's lines are asked for along the way, into the second cache: asked for together, or into the
// first, they come at two thirds of the speed (10.5 instead of 17 GB/s on a Zen 4 core).
#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "bench/cuda/bf16_attention.h"
#include "cuda/cpu/simd_avx512.h"

namespace crumb::bench {
namespace {

using cpu::Simd;

constexpr size_t kHeads = 4;
constexpr size_t kDim = 128;
constexpr size_t kTile = 64;
constexpr size_t kTranslationBatch = 4;
constexpr size_t kMemoryPage = 4096;

__m512bh LoadPairs(const BFloat16* from) {
  return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from));
}

struct State {  // NOLINT(cppcoreguidelines-pro-type-member-init): used as State{}.
  alignas(64) BFloat16 queries[kHeads][kDim];
  alignas(64) float scores[kHeads][kTile];
  alignas(64) uint16_t weights[kHeads][kTile];  // Bits of bfloat16.
  alignas(64) float outputs[kHeads][kDim];
  float max[kHeads];
  float sum[kHeads];
  float decay[kHeads];
};

void MultiplyKeys(const BFloat16* keys, const BFloat16* ahead, State& state) {
  for (size_t token = 0; token < kTile; token += 4) {
#pragma GCC unroll 16
    for (size_t i = 0; i < 4 * kDim; i += 32) {
      __builtin_prefetch(ahead + token * kDim + i, 0, 2);
    }
    __m512 sums[16];
#pragma GCC unroll 16
    for (size_t i = 0; i < 16; ++i) {
      sums[i] = _mm512_setzero_ps();
    }
#pragma GCC unroll 4
    for (size_t channel = 0; channel < kDim; channel += 32) {
      __m512bh x[4];
#pragma GCC unroll 4
      for (size_t i = 0; i < 4; ++i) {
        x[i] = LoadPairs(keys + (token + i) * kDim + channel);
      }
#pragma GCC unroll 4
      for (size_t head = 0; head < kHeads; ++head) {
        const __m512bh q = LoadPairs(state.queries[head] + channel);
#pragma GCC unroll 4
        for (size_t i = 0; i < 4; ++i) {
          sums[head * 4 + i] = _mm512_dpbf16_ps(sums[head * 4 + i], x[i], q);
        }
      }
    }
    const __m512 all = Simd::SumEach(sums);
    _mm_store_ps(state.scores[0] + token, _mm512_extractf32x4_ps(all, 0));
    _mm_store_ps(state.scores[1] + token, _mm512_extractf32x4_ps(all, 1));
    _mm_store_ps(state.scores[2] + token, _mm512_extractf32x4_ps(all, 2));
    _mm_store_ps(state.scores[3] + token, _mm512_extractf32x4_ps(all, 3));
  }
}

void MakeWeights(float scale, State& state) {
  for (size_t head = 0; head < kHeads; ++head) {
    __m512 highest = _mm512_set1_ps(state.max[head]);
#pragma GCC unroll 4
    for (size_t i = 0; i < kTile; i += 16) {
      const __m512 score = _mm512_mul_ps(Simd::Load(state.scores[head] + i), Simd::Set(scale));
      Simd::Store(score, state.scores[head] + i);
      highest = _mm512_max_ps(highest, score);
    }
    const float max = _mm512_reduce_max_ps(highest);
    state.decay[head] = std::exp2(state.max[head] - max);
    __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (size_t i = 0; i < kTile; i += 16) {
      const __m512 p = Simd::Exp2(Simd::Sub(Simd::Load(state.scores[head] + i), Simd::Set(max)));
      sum = _mm512_add_ps(sum, p);
      _mm256_store_si256(reinterpret_cast<__m256i*>(state.weights[head] + i),
                         reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(p)));
    }
    state.max[head] = max;
    state.sum[head] = state.sum[head] * state.decay[head] + _mm512_reduce_add_ps(sum);
  }
}

// Two tokens at a time: their rows interleaved make the pairs of the dot product. Lanes come out
// as unpacking leaves them; Store puts them right.
void MultiplyValues(const BFloat16* values, const BFloat16* ahead, State& state) {
#pragma GCC unroll 2
  for (size_t channel = 0; channel < kDim; channel += 64) {
    __m512 sums[kHeads][4];
#pragma GCC unroll 4
    for (size_t head = 0; head < kHeads; ++head) {
#pragma GCC unroll 4
      for (size_t i = 0; i < 4; ++i) {
        sums[head][i] = _mm512_mul_ps(Simd::Load(state.outputs[head] + channel + 16 * i),
                                      Simd::Set(state.decay[head]));
      }
    }
    for (size_t token = 0; token < kTile; token += 2) {
      const BFloat16* row = values + token * kDim + channel;
      const BFloat16* row_ahead = ahead + token * kDim + channel;
      __m512bh pairs[4];
#pragma GCC unroll 2
      for (size_t i = 0; i < 2; ++i) {
        const __m512i first = _mm512_loadu_si512(row + 32 * i);
        const __m512i second = _mm512_loadu_si512(row + kDim + 32 * i);
        __builtin_prefetch(row_ahead + 32 * i, 0, 2);
        __builtin_prefetch(row_ahead + kDim + 32 * i, 0, 2);
        pairs[2 * i] = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(first, second));
        pairs[2 * i + 1] = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(first, second));
      }
#pragma GCC unroll 4
      for (size_t head = 0; head < kHeads; ++head) {
        int32_t both;
        __builtin_memcpy(&both, state.weights[head] + token, sizeof(both));
        const auto weight = reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
#pragma GCC unroll 4
        for (size_t i = 0; i < 4; ++i) {
          sums[head][i] = _mm512_dpbf16_ps(sums[head][i], pairs[i], weight);
        }
      }
    }
#pragma GCC unroll 4
    for (size_t head = 0; head < kHeads; ++head) {
#pragma GCC unroll 4
      for (size_t i = 0; i < 4; ++i) {
        Simd::Store(sums[head][i], state.outputs[head] + channel + 16 * i);
      }
    }
  }
}

// Addresses of kTranslationBatch pages from `first` on are translated together, as split attention
// does: docs/decisions/0021-fetching-scattered-pages.md.
void TranslateAhead(const Bf16AttentionParams& params, size_t first) {
  const size_t end = std::min(first + kTranslationBatch, params.num_pages);
  for (size_t page = first; page < end; ++page) {
    for (size_t i = 0; i < 2 * kTile * kDim; i += kMemoryPage / sizeof(BFloat16)) {
      __builtin_prefetch(params.pages[page] + i, 0, 2);
    }
  }
  asm volatile("");  // Or GCC 12 drops the call.
}

}  // namespace

bool HasAvx512Bf16() {
  return __builtin_cpu_supports("avx512bf16") != 0 && __builtin_cpu_supports("avx512bw") != 0;
}

void Bf16AttentionAvx512(const Bf16AttentionParams& params) {
  State state{};
  for (size_t head = 0; head < kHeads; ++head) {
    state.max[head] = -HUGE_VALF;
    for (size_t channel = 0; channel < kDim; ++channel) {
      state.queries[head][channel] = BFloat16::FromFloat(params.queries[head * kDim + channel]);
    }
  }
  TranslateAhead(params, 0);
  for (size_t page = 0; page < params.num_pages; ++page) {
    if (page % kTranslationBatch == 0) {
      TranslateAhead(params, page + kTranslationBatch);
    }
    const BFloat16* keys = params.pages[page];
    const BFloat16* ahead = params.pages[page + 1 < params.num_pages ? page + 1 : page];
    MultiplyKeys(keys, ahead, state);
    MakeWeights(params.scale * 1.44269504f, state);
    MultiplyValues(keys + kTile * kDim, ahead + kTile * kDim, state);
  }
  for (size_t head = 0; head < kHeads; ++head) {
    for (size_t i = 0; i < kDim;
         ++i) {  // Vector 2 b (+ 1), lane l: channel 32 b + 8 (l / 4) (+ 4) + l % 4.
      const size_t lane = i % 16;
      const size_t channel = i / 32 * 32 + lane / 4 * 8 + i / 16 % 2 * 4 + lane % 4;
      params.out[head * kDim + channel] = state.outputs[head][i] / state.sum[head];
    }
  }
}

}  // namespace crumb::bench
