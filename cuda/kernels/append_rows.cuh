// SPDX-License-Identifier: Apache-2.0
//
// New rows of one layer times their heads' rotations, into windows and rotated queries.
//
// Bound by latency: a decode step of a few tokens reads 1 MB of rotations a layer (8 KV heads,
// head_dim 128) and little else. A warp has 16 columns of one rotation in registers and loads its
// rows as the operand A itself, all in one go; no shared memory, no barrier.
//
// grid = [KV heads x (K and queries, V) x groups of columns, groups of rows]. Rows of K's rotation
// are, token by token, the key and then the queries that share its head; where queries have a
// rotation of their own, they have blocks of their own after V's. A row of fp16 is two bf16,
// exactly.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "crumb/cuda/append_rows.h"
#include "cuda/kernels/mma.cuh"
#include "cuda/launch/head_record.h"
#include "proto/page/page_format.h"

namespace crumb::gpu {

inline constexpr int kAppendWarps = 4;
inline constexpr int kAppendColumns = 16;    // Of a warp.
inline constexpr uint32_t kAppendRows = 16;  // Of a tile.

// Blocks of K, V and, of oscar-int2-tilted, queries.
__host__ __device__ constexpr uint32_t AppendRoles(const DeviceHeads& heads) {
  return heads.is_tilted ? 3 : 2;
}

// One row of the product: where it comes from, and where it goes.
struct AppendRow {
  const std::byte* from = nullptr;  // Null: there is no such row.
  std::byte* to = nullptr;          // Null: it goes nowhere.
  bool is_key = false;
  bool is_query = false;
};

template <int kDim, bool kFp16>
class AppendBlock {
 public:
  static constexpr int kSteps = kDim / 16;

  __device__ __forceinline__ explicit AppendBlock(const AppendRowsParams& params)
      : params_(params), lane_(static_cast<int>(threadIdx.x) % 32) {
    constexpr uint32_t kGroups = kDim / (kAppendWarps * kAppendColumns);
    const uint32_t roles = AppendRoles(params.heads);
    const uint32_t role = blockIdx.x / kGroups % roles;
    is_value_ = role == 1;
    head_ = blockIdx.x / kGroups / roles;
    column_ =
        static_cast<int>(blockIdx.x % kGroups * kAppendWarps + threadIdx.x / 32) * kAppendColumns;
    queries_ = params.num_query_heads / params.num_kv_heads;
    first_member_ = role == 2 ? 1 : 0;
    group_ = is_value_ ? 1 : roles == 2 ? 1 + queries_ : role == 2 ? queries_ : 1;
  }

  __device__ __forceinline__ void Run() {
    const HeadRecord layout{kDim, params_.heads.is_aware, params_.heads.is_tilted};
    const std::byte* record =
        params_.heads.records +
        (size_t{params_.layer} * params_.heads.num_kv_heads + params_.first_head + head_) *
            layout.bytes();
    LoadColumns(record, layout);
    const auto* shift = reinterpret_cast<const float*>(record + layout.shift(is_value_));
    const uint64_t num_rows = uint64_t{params_.num_tokens} * group_;
    for (uint64_t first = uint64_t{blockIdx.y} * kAppendRows; first < num_rows;
         first += uint64_t{gridDim.y} * kAppendRows) {
      RotateTile(first, num_rows, shift);
    }
  }

 private:
  __device__ __forceinline__ void LoadColumns(const std::byte* record, const HeadRecord& layout) {
    const int first = column_ / 8 * kSteps * 32 + lane_;
    const auto columns = [&](RotationPart part) {
      const size_t offset =
          first_member_ > 0 ? layout.query_rotation(part) : layout.rotation(is_value_, part);
      return reinterpret_cast<const uint2*>(record + offset) + first;
    };
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

  __device__ __forceinline__ AppendRow Locate(uint64_t index, uint64_t num_rows) {
    AppendRow row;
    if (index >= num_rows) {
      return row;
    }
    const auto token = static_cast<uint32_t>(index / group_);
    const auto member = static_cast<uint32_t>(index % group_) + first_member_;
    if (member > 0) {
      const uint32_t query_head = head_ * queries_ + member - 1;
      row.is_query = true;
      row.from = static_cast<const std::byte*>(params_.queries.data) +
                 token * params_.queries.token_stride + size_t{query_head} * kDim * 2;
      row.to = static_cast<std::byte*>(params_.rotated_queries) +
               (size_t{token} * params_.num_query_heads + query_head) * kDim * 2;
      return row;
    }
    row.is_key = !is_value_;
    const TokenRows& rows = is_value_ ? params_.values : params_.keys;
    row.from = static_cast<const std::byte*>(rows.data) + token * rows.token_stride +
               size_t{head_} * kDim * 2;
    row.to = Slot(token);
    return row;
  }

  __device__ __forceinline__ std::byte* Slot(uint32_t token) {
    const uint32_t slot = params_.slots[token];
    if (slot == AppendRowsParams::kNoSlot) {
      return nullptr;
    }
    const uint32_t sequence = params_.sequences == nullptr ? token : params_.sequences[token];
    std::byte* page = nullptr;
    if (sequence < params_.num_sequences && slot / kPageTokens < params_.stride) {
      page = params_.pages[size_t{sequence} * params_.stride + slot / kPageTokens];
    }
    if (page == nullptr) {
      // One thread counts it: of the first head's keys, the first columns.
      if (head_ == 0 && !is_value_ && column_ == 0 && lane_ % 4 == 0) {
        atomicAdd(reinterpret_cast<unsigned long long*>(params_.tokens_left_out), 1ull);
      }
      return nullptr;
    }
    constexpr Bf16HeadBlock kFormat{kDim, kDim};
    return page + params_.block_offset + head_ * params_.head_stride +
           (is_value_ ? kFormat.value_offset() : kFormat.key_offset()) +
           size_t{slot % kPageTokens} * kDim * 2;
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

  __device__ __forceinline__ void RotateTile(uint64_t first,
                                             uint64_t num_rows,
                                             const float* shift) {
    const int g = lane_ / 4;
    const int t = lane_ % 4;
    const AppendRow rows[2] = {Locate(first + g, num_rows), Locate(first + 8 + g, num_rows)};
    uint32_t words[kSteps][4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::byte* from = rows[i % 2].from;
        words[k][i] =
            from == nullptr
                ? 0
                : *reinterpret_cast<const uint32_t*>(from + (16 * k + 8 * (i / 2) + 2 * t) * 2);
      }
    }
    float sums[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 start = *reinterpret_cast<const float2*>(shift + column_ + 8 * n + 2 * t);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sums[n][2 * half] = rows[half].is_key ? start.x : 0;
        sums[n][2 * half + 1] = rows[half].is_key ? start.y : 0;
      }
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t upper[4];
      uint32_t lower[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Split(words[k][i], upper[i], lower[i]);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        MmaBf16(sums[n], upper, lower_[n][k].x, lower_[n][k].y);
        if constexpr (kFp16) {
          MmaBf16(sums[n], lower, upper_[n][k].x, upper_[n][k].y);
        }
        MmaBf16(sums[n], upper, upper_[n][k].x, upper_[n][k].y);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (rows[half].to != nullptr) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          Store(rows[half], column_ + 8 * n + 2 * t, sums[n][2 * half], sums[n][2 * half + 1]);
        }
      }
    }
  }

  __device__ __forceinline__ static void Store(const AppendRow& row, int column, float x, float y) {
    uint32_t word = PackBf16(x, y);
    if (kFp16 && row.is_query) {
      const __half2 pair = __floats2half2_rn(x, y);
      memcpy(&word, &pair, sizeof(word));
    }
    *reinterpret_cast<uint32_t*>(row.to + column * 2) = word;
  }

  const AppendRowsParams& params_;
  const int lane_;
  bool is_value_;
  uint32_t head_;
  int column_;
  uint32_t queries_;       // A KV head.
  uint32_t first_member_;  // Of a token's rows: 0 is the key (or the value), then queries.
  uint32_t group_;         // Rows a token.
  uint2 upper_[2][kSteps];
  uint2 lower_[2][kSteps];
};

template <int kDim, bool kFp16>
__global__ __launch_bounds__(32 * kAppendWarps) void AppendRowsKernel(
    const __grid_constant__ AppendRowsParams params) {
  AppendBlock<kDim, kFp16>(params).Run();
}

}  // namespace crumb::gpu
