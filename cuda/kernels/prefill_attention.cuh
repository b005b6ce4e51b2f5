// SPDX-License-Identifier: Apache-2.0
//
// Attention of a chunk over INT2 pages and BF16 windows, by online softmax (FlashAttention-2, arXiv
// 2307.08691). On compute capability 9.0 only head_dim 256 comes here: see prefill_warpgroups.cuh.
//
// grid = [groups of 128 rows, KV heads]; a row is a (query token, query head) pair of the KV head,
// heads fastest, and a warp has 16 of them. A block walks over the pages, 64 tokens a step: while
// its warps multiply one tile, they unpack the next and the copies for the one after are on their
// way. A tile costs 2 * 128 * 64 * head_dim multiply-adds on the tensor cores for scores and as
// many for outputs, and two instructions a code to unpack, an eighth of that time.
#pragma once

#include <cstdint>

#include "cuda/kernels/null_pages.cuh"
#include "cuda/kernels/prefill_tiles.cuh"

namespace crumb::gpu {

inline constexpr int kPrefillWarps = kPrefillThreads / 32;
inline constexpr int kPrefillRows = 16 * kPrefillWarps;

template <int kDim>
struct PrefillShared {
  PrefillTile<kDim> tiles[2];
  alignas(16) std::byte blocks[2][Int2HeadBlock{kDim, kDim}.bytes()];
};

// What a lane knows of its two rows, g and g + 8 of the warp's 16.
template <int kDim>
struct PrefillState {
  float outputs[kDim / 8][4] = {};
  float max[2] = {-INFINITY, -INFINITY};  // Of the scores, in base-2 exponents.
  float sum[2] = {0, 0};                  // Of this lane's weights.
  float offset[2] = {0, 0};               // Sum of weight * minimum of V over this lane's tokens.
};

template <int kDim>
class PrefillBlock {
 public:
  static constexpr int kSteps = kDim / 16;
  using Shared = PrefillShared<kDim>;
  using Tile = PageTile<kDim>;

  __device__ __forceinline__ PrefillBlock(const PrefillAttentionParams& params, Shared& shared)
      : params_(params),
        shared_(shared),
        lane_(static_cast<int>(threadIdx.x) % 32),
        group_(params.num_query_heads / params.num_kv_heads) {
    const uint32_t num_rows = params.num_queries * group_;
    const uint32_t first = blockIdx.x * kPrefillRows;
    const uint32_t last = min(first + kPrefillRows, num_rows) - 1;
    const uint32_t seen = params.window_tokens - params.num_queries + last / group_ + 1;
    num_tiles_ = params.history_pages + (seen + kPageTokens - 1) / kPageTokens;
    const uint32_t warp_row = first + threadIdx.x / 32 * 16;
    for (int half = 0; half < 2; ++half) {
      row_[half] = warp_row + 8 * half + lane_ / 4;
      has_row_[half] = row_[half] < num_rows;
      const uint32_t query = has_row_[half] ? row_[half] / group_ : 0;
      limit_[half] = static_cast<int>(params.window_tokens - params.num_queries + query);
    }
  }

  __device__ __forceinline__ void Run() {
    LoadQueries();
    Start(0);
    Start(1);
    WaitForCopies<0>();
    __syncthreads();
    Prepare(0);
    WaitForCopies<0>();
    __syncthreads();
    for (uint32_t tile = 0; tile < num_tiles_; ++tile) {
      if (tile + 1 < num_tiles_) {
        Start(tile + 2);
        Prepare(tile + 1);
      }
      Attend(shared_.tiles[tile % 2], tile);
      WaitForCopies<0>();
      __syncthreads();
    }
    StoreOutputs();
  }

 private:
  // Null: the page is.
  __device__ __forceinline__ const std::byte* BlockOf(const DevicePageTable& table, uint32_t page) {
    const std::byte* image = table.pages[page];
    return image == nullptr ? nullptr : image + table.block_offset + blockIdx.y * table.head_stride;
  }

  // Row `half`'s offset in queries and outputs, in elements.
  __device__ __forceinline__ size_t RowOffset(int half) const {
    const uint32_t query = row_[half] / group_;
    const uint32_t head = blockIdx.y * group_ + row_[half] % group_;
    return size_t{query} * params_.num_query_heads + head;
  }

  // Queries as operand A, and their sums, which minima of K are multiplied by.
  __device__ __forceinline__ void LoadQueries() {
    const int t = lane_ % 4;
    query_sum_[0] = query_sum_[1] = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto* from = static_cast<const std::byte*>(params_.queries) +
                         (has_row_[half] ? RowOffset(half) : 0) * kDim * 2 + t * 4;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t loaded =
              has_row_[half] ? *reinterpret_cast<const uint32_t*>(from + k * 32 + i * 16) : 0;
          const uint32_t word = QueryPair(loaded, params_.query_type);
          queries_[k][half + 2 * i] = word;
          query_sum_[half] += __uint_as_float(word << 16) + __uint_as_float(word & 0xffff0000u);
        }
      }
      query_sum_[half] += __shfl_xor_sync(kFullWarp, query_sum_[half], 1);
      query_sum_[half] += __shfl_xor_sync(kFullWarp, query_sum_[half], 2);
    }
  }

  // Starts what of tile `index` comes by way of a buffer: INT2 head blocks.
  __device__ __forceinline__ void Start(uint32_t index) {
    if (index < num_tiles_ && index < params_.history_pages) {
      LoadBlockAsync<kDim>(shared_.blocks[index % 2], BlockOf(params_.history, index));
    }
    CommitCopies();
  }

  // Makes tile `index`, whose buffer is filled.
  __device__ __forceinline__ void Prepare(uint32_t index) {
    PrefillTile<kDim>& tile = shared_.tiles[index % 2];
    if (index < params_.history_pages) {
      UnpackTile<kDim>(shared_.blocks[index % 2], tile);
      return;
    }
    const uint32_t page = index - params_.history_pages;
    const std::byte* block = BlockOf(params_.windows, page);
    const uint32_t count =
        block == nullptr ? 0 : min(params_.window_tokens - page * kPageTokens, kPageTokens);
    LoadWindowAsync<kDim>(tile, block, static_cast<int>(count));
    CommitCopies();
  }

  // scores[n] of tokens 8 n + 2 t, + 1 of rows g and g + 8.
  __device__ __forceinline__ void Multiply(const PrefillTile<kDim>& tile, float (&scores)[8][4]) {
    const std::byte* rows =
        tile.keys + (lane_ % 8 + lane_ / 16 * 8) * Tile::kStride + lane_ / 8 % 2 * 16;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        uint32_t b[4];
        LoadMatrices(b, rows + n * 16 * Tile::kStride + k * 32);
        MmaBf16(scores[2 * n], queries_[k], b[0], b[1]);
        MmaBf16(scores[2 * n + 1], queries_[k], b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ void Attend(const PrefillTile<kDim>& tile, uint32_t index) {
    float scores[8][4] = {};
    Multiply(tile, scores);
    const bool is_window = index >= params_.history_pages;
    const int first_token =
        is_window ? static_cast<int>((index - params_.history_pages) * kPageTokens) : 0;
    const int t = lane_ % 4;
    float highest[2] = {-INFINITY, -INFINITY};
    const float scale = params_.scale * 1.4426950408889634f;  // Into base-2 exponents.
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = 8 * n + 2 * t + i;
        const float2 key = *reinterpret_cast<const float2*>(&tile.meta[token]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& score = scores[n][2 * half + i];
          score = scale * fmaf(score, key.x, key.y * query_sum_[half]);
          if (is_window && first_token + token > limit_[half]) {
            score = -INFINITY;
          }
          highest[half] = fmaxf(highest[half], score);
        }
      }
    }
    Raise(highest);
    uint32_t weights[8][2];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float scaled[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 value = *(reinterpret_cast<const float2*>(&tile.meta[8 * n + 2 * t + i]) + 1);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float weight = Exp2(scores[n][2 * half + i] - base_[half]);
          state_.sum[half] += weight;
          state_.offset[half] = fmaf(weight, value.y, state_.offset[half]);
          scaled[half][i] = weight * value.x;
        }
      }
      weights[n][0] = PackBf16(scaled[0][0], scaled[0][1]);
      weights[n][1] = PackBf16(scaled[1][0], scaled[1][1]);
    }
    Accumulate(tile, weights);
  }

  // Moves the rows' maxima to at least `highest`, which are this lane's.
  __device__ __forceinline__ void Raise(float (&highest)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      highest[half] = fmaxf(highest[half], __shfl_xor_sync(kFullWarp, highest[half], 1));
      highest[half] = fmaxf(highest[half], __shfl_xor_sync(kFullWarp, highest[half], 2));
      const float raised = fmaxf(state_.max[half], highest[half]);
      // A row that has seen nothing has no maximum to subtract.
      base_[half] = raised == -INFINITY ? 0 : raised;
      const float decay = Exp2(state_.max[half] - base_[half]);
      state_.max[half] = raised;
      state_.sum[half] *= decay;
      state_.offset[half] *= decay;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        state_.outputs[n][2 * half] *= decay;
        state_.outputs[n][2 * half + 1] *= decay;
      }
    }
  }

  __device__ __forceinline__ void Accumulate(const PrefillTile<kDim>& tile,
                                             const uint32_t (&weights)[8][2]) {
    const std::byte* rows = tile.values + (lane_ % 16) * Tile::kStride + lane_ / 16 * 16;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t a[4] = {weights[2 * k][0], weights[2 * k][1], weights[2 * k + 1][0],
                             weights[2 * k + 1][1]};
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) {
        uint32_t b[4];
        LoadMatricesTransposed(b, rows + k * 16 * Tile::kStride + n * 32);
        MmaBf16(state_.outputs[2 * n], a, b[0], b[1]);
        MmaBf16(state_.outputs[2 * n + 1], a, b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ void StoreOutputs() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      StoreOutputRow<kDim>(params_, RowOffset(half), has_row_[half], state_.max[half],
                           state_.sum[half], state_.offset[half], lane_,
                           [&](int n, int i) { return state_.outputs[n][2 * half + i]; });
    }
  }

  const PrefillAttentionParams& params_;
  Shared& shared_;
  const int lane_;
  const uint32_t group_;
  uint32_t num_tiles_;
  uint32_t row_[2];
  bool has_row_[2];
  int limit_[2];  // The last row of the windows that each sees.
  float query_sum_[2];
  float base_[2];
  uint32_t queries_[kSteps][4];
  PrefillState<kDim> state_;
};

template <int kDim>
__global__ __launch_bounds__(kPrefillThreads, kDim == 64 ? 2 : 1) void PrefillAttentionKernel(
    const __grid_constant__ PrefillAttentionParams params) {
  extern __shared__ __align__(16) std::byte memory[];
  CountNullPages(params);
  PrefillBlock<kDim>(params, *reinterpret_cast<PrefillShared<kDim>*>(memory)).Run();
}

}  // namespace crumb::gpu
