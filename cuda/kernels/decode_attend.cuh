// SPDX-License-Identifier: Apache-2.0
//
// One warp's attention to one unit of work: an INT2 head block or a tile of eight BF16 rows.
//
// Codes 0..3 are exact operands of the tensor cores, queries and probabilities have two digits
// (decode_queries.cuh), sums of products are exact integers. Scale and minimum of the rows stay
// outside: score = s * (q . c) + min * sum(q); output = sum((p * s_v) * c) + sum(p * min_v).
//
// Lanes: lane 4g + t has, for head t of each tile, the scores of tokens g, g + 8, ... and of the
// outputs the channels g, g + 8, ....
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/kernels/decode_queries.cuh"
#include "cuda/kernels/page_ring.cuh"
#include "cuda/kernels/ptx.cuh"

namespace crumb::gpu {

// What a lane knows after some units. Weights are 2^(score - max).
template <int kHeadDim, int kTiles>
struct AttentionState {
  // Of the scores, of INT2 rows with the logarithms of V's scales; in base-2 exponents, the same in
  // all lanes of a head.
  float max[kTiles];
  float sum[kTiles];     // Of the weights of this lane's tokens.
  float offset[kTiles];  // Sum of weight * minimum of V, of this lane's tokens; for all channels.
  float outputs[kTiles][kHeadDim / 8];

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      max[n] = -INFINITY;
      sum[n] = 0;
      offset[n] = 0;
#pragma unroll
      for (int i = 0; i < kHeadDim / 8; ++i) {
        outputs[n][i] = 0;
      }
    }
  }

  // Moves tile n to a maximum of at least `highest`, which is finite.
  __device__ __forceinline__ void RaiseMax(int n, float highest) {
    const float raised = fmaxf(max[n], highest);
    if (__any_sync(kFullWarp, raised > max[n])) {  // Rare after the first few units.
      const float decay = Exp2(max[n] - raised);
      max[n] = raised;
      sum[n] *= decay;
      offset[n] *= decay;
#pragma unroll
      for (int i = 0; i < kHeadDim / 8; ++i) {
        outputs[n][i] *= decay;
      }
    }
  }

  // Adds up what lanes hold of the same head.
  __device__ __forceinline__ void ReduceSums() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        sum[n] += __shfl_xor_sync(kFullWarp, sum[n], step);
        offset[n] += __shfl_xor_sync(kFullWarp, offset[n], step);
      }
    }
  }
};

// Over the lanes that hold other tokens of the same head.
__device__ __forceinline__ float MaxOfHead(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
    x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, step));
  }
  return x;
}

// A word of codes as an A operand. Odd rows come out four times too large.
__device__ __forceinline__ void UnpackCodes(uint32_t word, uint32_t (&a)[4]) {
  const uint32_t upper = word >> 4;
  a[0] = word & 0x03030303u;
  a[1] = word & 0x0c0c0c0cu;
  a[2] = upper & 0x03030303u;
  a[3] = upper & 0x0c0c0c0cu;
}

// No page has a lesser one; the logarithm of 0 would be no use.
inline constexpr float kLeastScale = 0x1p-24f;

// A lane's eight (scale, minimum) pairs: tokens 16 i + g, then 16 i + 8 + g.
struct RowMeta {
  uint32_t words[8];

  __device__ __forceinline__ explicit RowMeta(const std::byte* meta, int g) {
    const auto* vectors = reinterpret_cast<const uint4*>(meta + g * 32);
    const uint4 low = vectors[0];
    const uint4 high = vectors[1];
    words[0] = low.x;
    words[1] = low.y;
    words[2] = low.z;
    words[3] = low.w;
    words[4] = high.x;
    words[5] = high.y;
    words[6] = high.z;
    words[7] = high.w;
  }
  __device__ __forceinline__ float2 operator[](int i) const {
    return __half22float2(reinterpret_cast<const __half2&>(words[i]));
  }
};

template <int kHeadDim, int kTiles>
class WarpAttention {
 public:
  using State = AttentionState<kHeadDim, kTiles>;
  using Fragments = QueryFragments<kHeadDim, kTiles>;

  __device__ __forceinline__ explicit WarpAttention(int lane)
      : lane_(lane), g_(lane / 4), t_(lane % 4) {}

  __device__ __forceinline__ State& state() { return state_; }

  // For another pair (sequence, KV head), whose fragments are ready.
  __device__ __forceinline__ void Start(const Fragments& fragments) {
    state_.Clear();
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 16; ++i) {
        digits_[n][i] = fragments.digits[n][i / 2][i % 2][lane_];
      }
      unit_[n] = fragments.unit[n * kHeadsOfTile + t_];
      query_sum_[n] = fragments.sum[n * kHeadsOfTile + t_];
    }
  }

  __device__ __forceinline__ void AttendPage(const std::byte* block) {
    using Layout = StageLayout<kHeadDim>;
    float scores[kTiles][8];
    const RowMeta key_meta(block + Layout::kInt2.key_meta_offset(), g_);
    ScorePage(reinterpret_cast<const uint4*>(block), key_meta, scores);
    const RowMeta value_meta(block + Layout::kInt2.value_meta_offset(), g_);
    float log_scales[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      log_scales[i] = Log2(fmaxf(value_meta[i].x, kLeastScale));
    }
    uint32_t weights[kTiles][2][2];
    float output_unit[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      output_unit[n] = WeighPage(n, scores[n], value_meta, log_scales, weights[n]);
    }
    AddValues(reinterpret_cast<const uint4*>(block + Layout::kInt2.value_codes_offset()), weights,
              output_unit);
  }

  // Of `rows` tokens, 1 to 8; what the tile holds of others is not looked at.
  __device__ __forceinline__ void AttendTile(std::byte* tile,
                                             int rows,
                                             const Fragments& fragments,
                                             float score_scale);

 private:
  __device__ __forceinline__ void ScorePage(const uint4* codes,
                                            const RowMeta& meta,
                                            float (&scores)[kTiles][8]) const {
    constexpr int kSteps = kHeadDim / 32;
    int sums[kTiles][4];
#pragma unroll
    for (int vector = 0; vector < kSteps; ++vector) {
      const uint4 loaded = codes[vector * 32 + lane_];
      const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int tile = (vector * 4 + i) / kSteps;
        const int step = (vector * 4 + i) % kSteps;
        uint32_t a[4];
        UnpackCodes(words[i], a);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          if (step == 0) {
            sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0;
          }
          MmaU8S8(sums[n], a, digits_[n][step * 2], digits_[n][step * 2 + 1]);
          if (step == kSteps - 1) {
            const float2 even = meta[tile];
            const float2 odd = meta[4 + tile];
            scores[n][tile] = fmaf(static_cast<float>(sums[n][0] * 256 + sums[n][1]),
                                   unit_[n] * even.x, even.y * query_sum_[n]);
            scores[n][4 + tile] = fmaf(static_cast<float>(sums[n][2] * 256 + sums[n][3]),
                                       unit_[n] * 0.25f * odd.x, odd.y * query_sum_[n]);
          }
        }
      }
    }
  }

  // Scores to weights: digits of weight * scale as a B operand for V's tokens, and what one of the
  // low digit is worth in outputs. Digits are relative to the page's own largest product, not to
  // the highest so far, nor to the largest scale: a page of many small probabilities would be
  // rounded away, or one where hardly any attention goes to a row of huge values.
  __device__ __forceinline__ float WeighPage(int n,
                                             const float (&scores)[8],
                                             const RowMeta& meta,
                                             const float (&log_scales)[8],
                                             uint32_t (&b)[2][2]) {
    float highest = scores[0] + log_scales[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) {
      highest = fmaxf(highest, scores[i] + log_scales[i]);
    }
    highest = MaxOfHead(highest);
    state_.RaiseMax(n, highest);
    const float share = Exp2(highest - state_.max[n]);
    float sum = 0;
    float offset = 0;
    uint32_t integers[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float weight = Exp2(scores[i] - highest);
      const float2 row = meta[i];
      sum += weight;
      offset = fmaf(weight, row.y, offset);
      // Adding 2^23 leaves the rounded integer in the low bits; adding 128 makes the second byte
      // the high digit, and the first the low one with its sign bit flipped.
      integers[i] = __float_as_uint(fmaf(weight, row.x * kDigitRange, 8388608.0f + 128.0f));
    }
    state_.sum[n] = fmaf(sum, share, state_.sum[n]);
    state_.offset[n] = fmaf(offset, share, state_.offset[n]);
#pragma unroll
    for (int kk = 0; kk < 2; ++kk) {
      const uint32_t* x = &integers[kk * 4];
      const uint32_t low_pair = __byte_perm(x[0], x[1], 0x5140);
      const uint32_t high_pair = __byte_perm(x[2], x[3], 0x5140);
      const uint32_t low_digits = __byte_perm(low_pair, high_pair, 0x5410) ^ 0x80808080u;
      const uint32_t high_digits = __byte_perm(low_pair, high_pair, 0x7632);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int source = (half * 4 + t_) * 4 + g_ / 2;
        const uint32_t high = __shfl_sync(kFullWarp, high_digits, source);
        const uint32_t low = __shfl_sync(kFullWarp, low_digits, source);
        b[kk][half] = g_ % 2 == 0 ? high : low;
      }
    }
    return (1 / kDigitRange) * share;
  }

  __device__ __forceinline__ void AddValues(const uint4* codes,
                                            const uint32_t (&weights)[kTiles][2][2],
                                            const float (&unit)[kTiles]) {
#pragma unroll
    for (int vector = 0; vector < kHeadDim / 32; ++vector) {
      const uint4 loaded = codes[vector * 32 + lane_];
      const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int tile = vector * 2 + i;
        int sums[kTiles][4];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0;
        }
#pragma unroll
        for (int kk = 0; kk < 2; ++kk) {
          uint32_t a[4];
          UnpackCodes(words[i * 2 + kk], a);
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            MmaU8S8(sums[n], a, weights[n][kk][0], weights[n][kk][1]);
          }
        }
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          float* out = &state_.outputs[n][tile * 2];
          out[0] = fmaf(static_cast<float>(sums[n][0] * 256 + sums[n][1]), unit[n], out[0]);
          out[1] = fmaf(static_cast<float>(sums[n][2] * 256 + sums[n][3]), unit[n] * 0.25f, out[1]);
        }
      }
    }
  }

  int lane_;
  int g_;
  int t_;
  State state_;
  uint32_t digits_[kTiles][kHeadDim / 16];
  float unit_[kTiles];
  float query_sum_[kTiles];
};

template <int kHeadDim, int kTiles>
__device__ __forceinline__ void WarpAttention<kHeadDim, kTiles>::AttendTile(
    std::byte* tile, int rows, const Fragments& fragments, float score_scale) {
  using Layout = StageLayout<kHeadDim>;
  std::byte* values = tile + Layout::kValuesOffset;
  if (rows < kTileRows) {  // Bytes of other rows may be NaN, which no weight of 0 takes out.
    constexpr int kWords = Layout::kRowStride / 4;
    for (int i = rows * kWords + lane_; i < kTileRows * kWords; i += 32) {
      reinterpret_cast<uint32_t*>(values)[i] = 0;
    }
    AsyncProxyFence();
    __syncwarp();
  }
  const int row_offset = lane_ % 8 * Layout::kRowStride + lane_ / 8 * 16;
  float sums[kTiles][4] = {};
#pragma unroll
  for (int step = 0; step < kHeadDim / 32; ++step) {
    uint32_t a[4];
    LoadMatrices(a, tile + row_offset + step * 64);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const auto* b = reinterpret_cast<const uint2*>(fragments.bf16[n][step * 2]) + lane_;
      MmaBf16Rows8(sums[n], a[0], a[1], b[0]);
      MmaBf16Rows8(sums[n], a[2], a[3], b[32]);
    }
  }
  uint32_t weights[kTiles];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float score = g_ < rows ? (sums[n][0] + sums[n][1]) * score_scale : -INFINITY;
    state_.RaiseMax(n, MaxOfHead(score));
    const float weight = Exp2(score - state_.max[n]);
    state_.sum[n] += weight;
    const __nv_bfloat16 high = __float2bfloat16_rn(weight);
    const uint32_t both = PackBf16(high, __float2bfloat16_rn(weight - __bfloat162float(high)));
    const uint32_t even = __shfl_sync(kFullWarp, both, t_ * 8 + g_ / 2);
    const uint32_t odd = __shfl_sync(kFullWarp, both, t_ * 8 + 4 + g_ / 2);
    weights[n] = __byte_perm(even, odd, g_ % 2 == 0 ? 0x5410 : 0x7632);
  }
#pragma unroll
  for (int step = 0; step < kHeadDim / 32; ++step) {
    uint32_t a[4];
    LoadMatricesTransposed(a, values + row_offset + step * 64);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float products[4] = {};
        MmaBf16K8(products, a[i * 2], a[i * 2 + 1], weights[n]);
        float* out = &state_.outputs[n][(step * 2 + i) * 2];
        out[0] += products[0] + products[1];
        out[1] += products[2] + products[3];
      }
    }
  }
}

}  // namespace crumb::gpu
