// SPDX-License-Identifier: Apache-2.0
//
// New rows of one layer times their heads' rotations, into windows and rotated queries.
//
// Bound by latency: a decode step of a few tokens reads 1 MB of rotations a layer (8 KV heads,
// head_dim 128) and little else. A warp has 16 columns of one rotation in registers. They are asked
// for before the launch ahead of this one has ended, and what is computed from parameters alone,
// where rows come from, is computed by then too, by a thread a row. The rows themselves come
// through shared memory, two tiles of 16 at a time, and the next two are asked for before products
// begin.
//
// grid = [KV heads x groups of columns, runs of tiles: of K and queries, then of V]. Rows of K's
// rotation are, token by token, the key and then the queries that share its head; where queries
// have a rotation of their own, they have runs of their own after V's. A row of fp16 is two bf16,
// exactly.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "crumb/cuda/append_rows.h"
#include "cuda/kernels/mma.cuh"
#include "cuda/launch/append_rows.h"
#include "cuda/launch/head_record.h"
#include "proto/page/page_format.h"

namespace crumb::gpu {

inline constexpr int kAppendWarps = 4;       // That share out a block's columns,
inline constexpr int kAppendTurns = 2;       // and as many again, that take turns with its tiles.
inline constexpr int kAppendColumns = 16;    // Of a warp.
inline constexpr uint32_t kAppendRows = 16;  // Of a tile.
inline constexpr int kAppendThreads = 32 * kAppendWarps * kAppendTurns;

template <int kDim, bool kFp16>
class AppendBlock {
 public:
  static constexpr int kSteps = kDim / 16;
  static constexpr int kChunksOfRow = kDim / 8;  // Of 16 bytes.
  // Rows apart by 16 bytes more than they have, so that ldmatrix meets no bank twice.
  static constexpr int kStride = kDim * 2 + 16;
  static constexpr int kRows = kAppendTurns * kAppendRows;  // At a time.
  static constexpr int kChunksOfThread = kRows * kChunksOfRow / kAppendThreads;
  static_assert(kRows * kChunksOfRow % kAppendThreads == 0);
  static_assert(kAppendThreads % kRows == 0);

  enum Kind : uint8_t { kKey, kValue, kQuery };
  // Of as many rows as the block has threads.
  struct Memory {
    alignas(16) std::byte tiles[2][kRows * kStride];
    const std::byte* from[kAppendThreads];  // Null: there is no such row.
    std::byte* to[kAppendThreads];          // Null: it goes nowhere.
    Kind kinds[kAppendThreads];
  };

  __device__ __forceinline__ AppendBlock(const AppendRowsLaunch& launch, Memory& memory)
      : params_(launch.params), memory_(memory), lane_(static_cast<int>(threadIdx.x) % 32) {
    constexpr uint32_t kGroups = kDim / (kAppendWarps * kAppendColumns);
    const uint32_t warp = threadIdx.x / 32;
    head_ = blockIdx.x / kGroups;
    column_ = static_cast<int>(blockIdx.x % kGroups * kAppendWarps + warp % kAppendWarps) *
              kAppendColumns;
    const uint32_t values_end = launch.key_runs + launch.value_runs;
    is_value_ = blockIdx.y >= launch.key_runs && blockIdx.y < values_end;
    const bool is_query_run = blockIdx.y >= values_end;
    const uint32_t run = blockIdx.y - (is_query_run ? values_end : is_value_ ? launch.key_runs : 0);
    queries_ = params_.num_query_heads / params_.num_kv_heads;
    first_member_ = is_query_run ? 1 : 0;
    group_ = is_query_run ? queries_ : is_value_ || params_.heads.is_tilted ? 1 : 1 + queries_;
    turn_ = static_cast<int>(warp) / kAppendWarps;
    num_rows_ = uint64_t{params_.num_tokens} * group_;
    const uint64_t rows_of_run = uint64_t{launch.tiles_of_run} * kAppendRows;
    first_ = run * rows_of_run;
    end_ = min(first_ + rows_of_run, num_rows_);
  }

  __device__ __forceinline__ void Run() {
    const HeadRecord layout{kDim, params_.heads.is_aware, params_.heads.is_tilted};
    const std::byte* record =
        params_.heads.records +
        (size_t{params_.layer} * params_.heads.num_kv_heads + params_.first_head + head_) *
            layout.bytes();
    if (first_ + static_cast<uint32_t>(turn_) * kAppendRows < end_) {
      LoadColumns(record, layout);
    }
    LocateRows();
    WaitForEarlierWork();
    LetNextLaunchStart();
    while (first_ < end_) {
      RotateRows();
      first_ += kAppendThreads;
      if (first_ < end_) {
        __syncthreads();  // All are done with the rows before.
        LocateRows();
      }
    }
  }

 private:
  // Where the next rows come from: those of [first_, first_ + kAppendThreads) that there are.
  __device__ __forceinline__ void LocateRows() {
    const uint64_t mine = first_ + threadIdx.x;
    token_ = 0;
    to_ = nullptr;
    memory_.kinds[threadIdx.x] = kValue;
    memory_.from[threadIdx.x] = mine < end_ ? Locate(mine) : nullptr;
    __syncthreads();
  }

  // The rows that LocateRows has found.
  __device__ __forceinline__ void RotateRows() {
    const auto count = static_cast<int>(min(end_ - first_, uint64_t{kAppendThreads}));
    const auto mine = static_cast<int>(threadIdx.x);
    Fetch(0);
    // Two loads one after the other, while the rows are on their way.
    if (mine < count && memory_.kinds[mine] != kQuery && memory_.from[mine] != nullptr) {
      to_ = FindSlot(token_);
    }
    memory_.to[mine] = to_;
    int buffer = 0;
    for (int row = 0; row < count; row += kRows) {
      // Who still reads this buffer has not passed the barrier of the other.
      std::byte* tiles = memory_.tiles[buffer];
#pragma unroll
      for (int i = 0; i < kChunksOfThread; ++i) {
        const int chunk = mine + i * kAppendThreads;
        *reinterpret_cast<uint4*>(tiles + chunk / kChunksOfRow * kStride +
                                  chunk % kChunksOfRow * 16) = chunks_[i];
      }
      __syncthreads();
      if (row + kRows < count) {
        Fetch(row + kRows);
      }
      const int tile = turn_ * static_cast<int>(kAppendRows);
      if (row + tile < count) {
        RotateTile(tiles + tile * kStride, row + tile);
      }
      buffer ^= 1;
    }
  }

  __device__ __forceinline__ void LoadColumns(const std::byte* record, const HeadRecord& layout) {
    const int first = column_ / 8 * kSteps * 32 + lane_;
    const auto columns = [&](RotationPart part) {
      const size_t offset =
          first_member_ > 0 ? layout.query_rotation(part) : layout.rotation(is_value_, part);
      return reinterpret_cast<const uint2*>(record + offset) + first;
    };
    const auto* shift =
        reinterpret_cast<const float*>(record + layout.shift(is_value_)) + column_ + lane_ % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      shift_[n] = *reinterpret_cast<const float2*>(shift + 8 * n);
    }
    const uint2* upper = columns(kRotateUpper);
    const uint2* lower = columns(kRotateLower);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        upper_[n][k] = upper[(n * kSteps + k) * 32];
        lower_[n][k] = lower[(n * kSteps + k) * 32];
      }
    }
  }

  // Where the thread's row comes from and what it is; a query's place, too. Loads nothing.
  __device__ __forceinline__ const std::byte* Locate(uint64_t index) {
    // 64-bit division is a hundred instructions.
    const bool is_small = num_rows_ >> 32 == 0;
    token_ =
        is_small ? static_cast<uint32_t>(index) / group_ : static_cast<uint32_t>(index / group_);
    const auto member = static_cast<uint32_t>(index - uint64_t{token_} * group_) + first_member_;
    memory_.kinds[threadIdx.x] = member > 0 ? kQuery : is_value_ ? kValue : kKey;
    if (member > 0) {
      const uint32_t query_head = head_ * queries_ + member - 1;
      to_ = static_cast<std::byte*>(params_.rotated_queries) +
            (size_t{token_} * params_.num_query_heads + query_head) * kDim * 2;
      return static_cast<const std::byte*>(params_.queries.data) +
             token_ * params_.queries.token_stride + size_t{query_head} * kDim * 2;
    }
    const TokenRows& rows = is_value_ ? params_.values : params_.keys;
    if (rows.data == nullptr) {
      return nullptr;  // Of queries alone.
    }
    return static_cast<const std::byte*>(rows.data) + token_ * rows.token_stride +
           size_t{head_} * kDim * 2;
  }

  // Where a token's key or value goes in the windows.
  __device__ __forceinline__ std::byte* FindSlot(uint32_t token) const {
    const uint32_t slot = params_.slots[token];
    const uint32_t sequence = params_.sequences == nullptr ? token : params_.sequences[token];
    if (slot == AppendRowsParams::kNoSlot) {
      return nullptr;
    }
    std::byte* page = nullptr;
    if (sequence < params_.num_sequences && slot / kPageTokens < params_.stride) {
      page = params_.pages[size_t{sequence} * params_.stride + slot / kPageTokens];
    }
    if (page == nullptr) {
      // One block counts it: of the first head's keys, the first columns.
      if (head_ == 0 && !is_value_ && column_ < kAppendWarps * kAppendColumns) {
        atomicAdd(reinterpret_cast<unsigned long long*>(params_.tokens_left_out), 1ull);
      }
      return nullptr;
    }
    constexpr Bf16HeadBlock kFormat{kDim, kDim};
    return page + params_.block_offset + head_ * params_.head_stride +
           (is_value_ ? kFormat.value_offset() : kFormat.key_offset()) +
           size_t{slot % kPageTokens} * kDim * 2;
  }

  // Asks for this thread's part of the tiles from `row` on.
  __device__ __forceinline__ void Fetch(int row) {
#pragma unroll
    for (int i = 0; i < kChunksOfThread; ++i) {
      const int chunk = static_cast<int>(threadIdx.x) + i * kAppendThreads;
      const std::byte* from = memory_.from[row + chunk / kChunksOfRow];
      chunks_[i] = make_uint4(0, 0, 0, 0);
      if (from != nullptr) {
        chunks_[i] = *reinterpret_cast<const uint4*>(from + chunk % kChunksOfRow * 16);
      }
    }
  }

  // A pair of elements as bf16 in `upper`, and what bf16 leaves of fp16 in `lower`.
  __device__ __forceinline__ static void Split(uint32_t word, uint32_t& upper, uint32_t& lower) {
    if constexpr (!kFp16) {
      upper = word;
      return;
    }
    __half2 pair;
    memcpy(&pair, &word, sizeof(pair));
    const float2 x = __half22float2(pair);
    upper = PackBf16(x.x, x.y);
    lower =
        PackBf16(x.x - __uint_as_float(upper << 16), x.y - __uint_as_float(upper & 0xffff0000u));
  }

  // `first` is the tile's first row, of those that the block has found.
  __device__ __forceinline__ void RotateTile(const std::byte* tile, int first) const {
    const int t = lane_ % 4;
    const int row = first + lane_ / 4;
    const bool is_key[2] = {memory_.kinds[row] == kKey, memory_.kinds[row + 8] == kKey};
    float sums[2][4];
    float lower_sums[2][4] = {};  // Of the matrix's lower part: products that wait for no others.
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sums[n][2 * half] = is_key[half] ? shift_[n].x : 0;
        sums[n][2 * half + 1] = is_key[half] ? shift_[n].y : 0;
      }
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t words[4];
      uint32_t upper[4];
      uint32_t lower[4];
      LoadMatrices(words, OperandRow(tile + k * 32, kStride, lane_));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Split(words[i], upper[i], lower[i]);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        MmaBf16(lower_sums[n], upper, lower_[n][k].x, lower_[n][k].y);
        if constexpr (kFp16) {
          MmaBf16(lower_sums[n], lower, upper_[n][k].x, upper_[n][k].y);
        }
        MmaBf16(sums[n], upper, upper_[n][k].x, upper_[n][k].y);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::byte* to = memory_.to[row + 8 * half];
      if (to != nullptr) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          Store(to + (column_ + 8 * n + 2 * t) * 2, memory_.kinds[row + 8 * half] == kQuery,
                sums[n][2 * half] + lower_sums[n][2 * half],
                sums[n][2 * half + 1] + lower_sums[n][2 * half + 1]);
        }
      }
    }
  }

  __device__ __forceinline__ static void Store(std::byte* to, bool is_query, float x, float y) {
    uint32_t word = PackBf16(x, y);
    if (kFp16 && is_query) {
      const __half2 pair = __floats2half2_rn(x, y);
      memcpy(&word, &pair, sizeof(word));
    }
    *reinterpret_cast<uint32_t*>(to) = word;
  }

  const AppendRowsParams& params_;
  Memory& memory_;
  const int lane_;
  bool is_value_;
  uint32_t head_;
  int column_;
  uint32_t queries_;       // A KV head.
  uint32_t first_member_;  // Of a token's rows: 0 is the key (or the value), then queries.
  uint32_t group_;         // Rows a token.
  int turn_;               // Which of the tiles that a block has at a time is the warp's.
  uint64_t num_rows_;
  uint64_t first_;           // Of the block's rows: the next,
  uint64_t end_;             // and where they end.
  uint32_t token_ = 0;       // Of the thread's row,
  std::byte* to_ = nullptr;  // and where it goes, if it is a query.
  uint4 chunks_[kChunksOfThread];
  float2 shift_[2];  // Of the lane's columns, of keys.
  uint2 upper_[2][kSteps];
  uint2 lower_[2][kSteps];
};

// Two blocks a multiprocessor where registers allow: this launch's and the next one's.
template <int kDim, bool kFp16>
__global__ __launch_bounds__(kAppendThreads, kDim <= 128 ? 2 : 1) void AppendRowsKernel(
    const __grid_constant__ AppendRowsLaunch launch) {
  __shared__ typename AppendBlock<kDim, kFp16>::Memory memory;
  AppendBlock<kDim, kFp16>(launch, memory).Run();
}

}  // namespace crumb::gpu
