// SPDX-License-Identifier: Apache-2.0
//
// Expansion of pages: load a head block's K or V, unpack the codes, rotate back, store rows.
//
// A row of head_dim 128 is 36 bytes in and 256 out: at an H200's copy bandwidth of 4.3 TB/s, 14.7
// million rows a millisecond. x = (code * s + min) R^T + mean is computed as
//
//   s * unit * (256 * code U^T + code L^T) + min * sums + mean,     R = unit * (256 U + L),
//
// with both products exact on the integer tensor cores: 4 d^2 operations of a byte a row.
//
// grid = [blocks], each a contiguous share of the units (layer, head, K or V, page), pages fastest:
// a warp keeps its columns of R^T in registers while the head stays the same. The next unit's codes
// arrive while this one's rows are made.
#pragma once

#include <cstdint>

#include "crumb/cuda/expand_pages.h"
#include "cuda/kernels/page_rows.cuh"

namespace crumb::gpu {

template <int kDim>
inline constexpr int kExpandWarps = kDim == 256 ? 8 : 4;
template <int kDim>
inline constexpr int kExpandBlocks = kDim == 256 ? 1 : 4;

template <int kDim>
struct ExpandShared {
  static constexpr Int2HeadBlock kFormat{kDim, kDim};
  static constexpr uint32_t kCodesBytes = static_cast<uint32_t>(kFormat.key_codes_bytes());
  static constexpr uint32_t kPartBytes = kCodesBytes + static_cast<uint32_t>(kFormat.meta_bytes());
  static constexpr uint32_t kCodeStride = kDim + 16;  // Of a row of codes, one a byte.

  alignas(16) std::byte parts[2][kPartBytes];              // As loaded: codes, then meta.
  alignas(16) std::byte codes[kPageTokens * kCodeStride];  // [token, channel].
  alignas(16) std::byte rows[PageTile<kDim>::kBytes];
  std::byte* targets[kPageTokens];  // Of the rows; null: not to be written.
};

// c += A x B with A[16 x 32] of unsigned and B[32 x 8] of signed bytes is MmaU8S8 (ptx.cuh).
template <int kDim, int kWarps>
struct UnrotationColumns {
  static constexpr int kTiles = kDim / 8 / kWarps;
  static constexpr int kSteps = kDim / 32;
  uint2 upper[kTiles][kSteps];
  uint2 lower[kTiles][kSteps];

  __device__ __forceinline__ void Load(
      const std::byte* record, const HeadRecord& layout, bool is_value, int warp, int lane) {
    const int first = warp * kTiles * kSteps * 32 + lane;
    const auto* from_upper =
        reinterpret_cast<const uint2*>(record + layout.rotation(is_value, kUnrotateUpper)) + first;
    const auto* from_lower =
        reinterpret_cast<const uint2*>(record + layout.rotation(is_value, kUnrotateLower)) + first;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        upper[n][k] = from_upper[(n * kSteps + k) * 32];
        lower[n][k] = from_lower[(n * kSteps + k) * 32];
      }
    }
  }
};

template <int kDim>
class ExpandBlock {
 public:
  static constexpr int kWarps = kExpandWarps<kDim>;
  static constexpr int kThreads = 32 * kWarps;
  using Shared = ExpandShared<kDim>;
  using Tile = PageTile<kDim>;

  __device__ __forceinline__ ExpandBlock(const ExpandPagesParams& params, Shared& shared)
      : params_(params),
        shared_(shared),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        pages_((params.num_tokens + kPageTokens - 1) / kPageTokens) {}

  __device__ __forceinline__ void Run(uint32_t begin, uint32_t end) {
    if (begin < end) {
      LoadUnit(begin, 0);
    }
    uint32_t pair = ~0u;
    for (uint32_t index = begin; index < end; ++index) {
      const Unit unit(*this, index);
      if (index / pages_ != pair) {
        pair = index / pages_;
        TakeHead(unit);
      }
      FindTargets(unit);
      WaitForCopies<0>();
      __syncthreads();
      if (index + 1 < end) {
        LoadUnit(index + 1, (index + 1 - begin) % 2);
      }
      const std::byte* part = shared_.parts[(index - begin) % 2];
      Unpack(part, unit.is_value);
      __syncthreads();
      if (params_.space == ExpandSpace::kModel) {
        RotateBack(part + Shared::kCodesBytes);
      } else {
        Decode(part + Shared::kCodesBytes);
      }
      __syncthreads();
      StoreRows();
    }
  }

 private:
  struct Unit {
    uint32_t page;
    bool is_value;
    uint32_t head;
    uint32_t layer;
    __device__ __forceinline__ Unit(const ExpandBlock& block, uint32_t index)
        : page(index % block.pages_) {
      const uint32_t pair = index / block.pages_;
      is_value = pair % 2 != 0;
      head = pair / 2 % block.params_.num_heads;
      layer = pair / 2 / block.params_.num_heads;
    }
  };

  __device__ __forceinline__ void LoadUnit(uint32_t index, uint32_t which) {
    const Unit unit(*this, index);
    const ConstDeviceBlocks& from = params_.int2;
    const std::byte* block = from.pages[unit.page] + from.offset + unit.layer * from.layer_stride +
                             unit.head * from.head_stride;
    const std::byte* codes = block + (unit.is_value ? Shared::kFormat.value_codes_offset()
                                                    : Shared::kFormat.key_codes_offset());
    const std::byte* meta = block + (unit.is_value ? Shared::kFormat.value_meta_offset()
                                                   : Shared::kFormat.key_meta_offset());
    std::byte* to = shared_.parts[which];
    constexpr int kCodeChunks = Shared::kCodesBytes / 16;
    for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(Shared::kPartBytes / 16);
         i += kThreads) {
      CopyAsync16(to + i * 16, i < kCodeChunks ? codes + i * 16 : meta + (i - kCodeChunks) * 16);
    }
    CommitCopies();
  }

  __device__ __forceinline__ void TakeHead(const Unit& unit) {
    const DeviceHeads& heads = params_.heads;
    const HeadRecord layout{kDim, heads.is_aware, heads.is_tilted};
    const std::byte* record =
        heads.records + (size_t{params_.first_layer + unit.layer} * heads.num_kv_heads +
                         params_.first_head + unit.head) *
                            layout.bytes();
    if (params_.space == ExpandSpace::kModel) {
      columns_.Load(record, layout, unit.is_value, warp_, lane_);
      const auto* scalars = reinterpret_cast<const HeadScalars*>(record + layout.scalars());
      unit_ = scalars->digit_unit[unit.is_value ? 1 : 0];
      sums_ = reinterpret_cast<const float*>(record + layout.row_sums(unit.is_value));
      mean_ = reinterpret_cast<const float*>(record + layout.mean(unit.is_value));
    }
  }

  // Where each row of the unit goes.
  __device__ __forceinline__ void FindTargets(const Unit& unit) {
    const uint32_t row = threadIdx.x;
    if (row >= kPageTokens) {
      return;
    }
    const uint32_t token = unit.page * kPageTokens + row;
    std::byte* target = nullptr;
    if (token < params_.num_tokens) {
      const DevicePagedRows& to = unit.is_value ? params_.values : params_.keys;
      const uint32_t position = params_.first_position + token;
      const int32_t block = params_.block_table[position / params_.block_tokens];
      if (block >= 0 && static_cast<uint32_t>(block) < params_.num_blocks) {
        target = to.layers[unit.layer] + to.offset + static_cast<size_t>(block) * to.block_stride +
                 position % params_.block_tokens * to.token_stride + unit.head * to.head_stride;
      } else {
        atomicAdd(reinterpret_cast<unsigned long long*>(params_.rows_left_out), 1ull);
      }
    }
    shared_.targets[row] = target;
  }

  // Codes to a byte each, [token, channel].
  __device__ __forceinline__ void Unpack(const std::byte* part, bool is_value) {
    for (int i = static_cast<int>(threadIdx.x); i < kDim; i += kThreads) {
      if (is_value) {
        UnpackValues(reinterpret_cast<const uint32_t*>(part), i);
      } else {
        UnpackKeys(reinterpret_cast<const uint4*>(part), i);
      }
    }
  }
  __device__ __forceinline__ void StoreFour(int token, int channel, uint32_t word) {
    *reinterpret_cast<uint32_t*>(shared_.codes + token * Shared::kCodeStride + channel) =
        word & 0x03030303u;
  }
  __device__ __forceinline__ void UnpackKeys(const uint4* vectors, int i) {
    constexpr int kSteps = kDim / 32;
    const uint4 vector = vectors[i];
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
    const int g = i % 32 / 4;
    const int t = i % 4;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int index = i / 32 * 4 + w;
      const int token = 16 * (index / kSteps) + g;
      const int channel = 32 * (index % kSteps) + 4 * t;
      StoreFour(token, channel, words[w]);
      StoreFour(token + 8, channel, words[w] >> 2);
      StoreFour(token, channel + 16, words[w] >> 4);
      StoreFour(token + 8, channel + 16, words[w] >> 6);
    }
  }
  // Four words, of channels g = 4 q .. 4 q + 3, to rows of four channels.
  __device__ __forceinline__ void UnpackValues(const uint32_t* words, int i) {
    const int index = i / 8;
    const int q = i % 8 / 4;
    const int t = i % 4;
    uint32_t w[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      w[c] = words[Int2HeadBlock::WordIndex(static_cast<uint32_t>(index),
                                            static_cast<uint32_t>(4 * (4 * q + c) + t))];
    }
    const uint32_t low[2] = {__byte_perm(w[0], w[1], 0x5140), __byte_perm(w[2], w[3], 0x5140)};
    const uint32_t high[2] = {__byte_perm(w[0], w[1], 0x7362), __byte_perm(w[2], w[3], 0x7362)};
    const uint32_t rows[4] = {
        __byte_perm(low[0], low[1], 0x5410), __byte_perm(low[0], low[1], 0x7632),
        __byte_perm(high[0], high[1], 0x5410), __byte_perm(high[0], high[1], 0x7632)};
    const int channel = 16 * (index / 2) + 4 * q;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int token = 16 * j + 8 * (index % 2) + t;
      StoreFour(token, channel, rows[j]);
      StoreFour(token, channel + 8, rows[j] >> 2);
      StoreFour(token + 4, channel, rows[j] >> 4);
      StoreFour(token + 4, channel + 8, rows[j] >> 6);
    }
  }

  __device__ __forceinline__ static float2 MetaOf(const std::byte* meta, int token) {
    return __half22float2(reinterpret_cast<const __half2*>(
        meta)[Int2HeadBlock::MetaIndex(static_cast<uint32_t>(token))]);
  }

  // Stored space: code * scale + min.
  __device__ __forceinline__ void Decode(const std::byte* meta) {
    constexpr int kChunks = kDim / 8;
    for (int i = static_cast<int>(threadIdx.x); i < int{kPageTokens} * kChunks; i += kThreads) {
      const int token = i / kChunks;
      const int chunk = i % kChunks;
      const float2 row = MetaOf(meta, token);
      const uint2 codes =
          *reinterpret_cast<const uint2*>(shared_.codes + token * Shared::kCodeStride + chunk * 8);
      const auto value = [&](uint32_t word, int byte) {
        return __fadd_rn(__fmul_rn(static_cast<float>(word >> (8 * byte) & 0xff), row.x), row.y);
      };
      *reinterpret_cast<uint4*>(shared_.rows + token * Tile::kStride + chunk * 16) =
          make_uint4(PackBf16(value(codes.x, 0), value(codes.x, 1)),
                     PackBf16(value(codes.x, 2), value(codes.x, 3)),
                     PackBf16(value(codes.y, 0), value(codes.y, 1)),
                     PackBf16(value(codes.y, 2), value(codes.y, 3)));
    }
  }

  // Model space; every warp its columns of all rows.
  __device__ __forceinline__ void RotateBack(const std::byte* meta) {
    using Columns = UnrotationColumns<kDim, kWarps>;
    const int g = lane_ / 4;
    const int t = lane_ % 4;
    const int first_column = warp_ * Columns::kTiles * 8 + 2 * t;
#pragma unroll 1
    for (int tile = 0; tile < int{kPageTokens}; tile += 16) {
      int upper[Columns::kTiles][4] = {};
      int lower[Columns::kTiles][4] = {};
      const std::byte* operand =
          OperandRow(shared_.codes + tile * Shared::kCodeStride, Shared::kCodeStride, lane_);
#pragma unroll
      for (int k = 0; k < Columns::kSteps; ++k) {
        uint32_t a[4];
        LoadMatrices(a, operand + k * 32);
#pragma unroll
        for (int n = 0; n < Columns::kTiles; ++n) {
          MmaU8S8(upper[n], a, columns_.upper[n][k].x, columns_.upper[n][k].y);
          MmaU8S8(lower[n], a, columns_.lower[n][k].x, columns_.lower[n][k].y);
        }
      }
      const float2 row[2] = {MetaOf(meta, tile + g), MetaOf(meta, tile + 8 + g)};
#pragma unroll
      for (int n = 0; n < Columns::kTiles; ++n) {
        const int column = first_column + 8 * n;
        const float2 sums = *reinterpret_cast<const float2*>(sums_ + column);
        const float2 mean = *reinterpret_cast<const float2*>(mean_ + column);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float scale = row[half].x * unit_;
          const auto value = [&](int i, float sum, float center) {
            const int product = 256 * upper[n][i] + lower[n][i];
            return fmaf(static_cast<float>(product), scale, fmaf(row[half].y, sum, center));
          };
          *reinterpret_cast<uint32_t*>(shared_.rows + (tile + 8 * half + g) * Tile::kStride +
                                       column * 2) =
              PackBf16(value(2 * half, sums.x, mean.x), value(2 * half + 1, sums.y, mean.y));
        }
      }
    }
  }

  __device__ __forceinline__ void StoreRows() {
    constexpr int kChunks = Tile::kRowBytes / 16;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < int{kPageTokens} * kChunks; i += kThreads) {
      const int row = i / kChunks;
      const int chunk = i % kChunks;
      std::byte* target = shared_.targets[row];
      if (target != nullptr) {
        __stcs(reinterpret_cast<uint4*>(target + chunk * 16),
               *reinterpret_cast<const uint4*>(shared_.rows + row * Tile::kStride + chunk * 16));
      }
    }
    __syncthreads();  // Targets and rows are free for the next unit.
  }

  const ExpandPagesParams& params_;
  Shared& shared_;
  const int warp_;
  const int lane_;
  const uint32_t pages_;
  UnrotationColumns<kDim, kWarps> columns_;
  float unit_ = 0;
  const float* sums_ = nullptr;
  const float* mean_ = nullptr;
};

template <int kDim>
__global__ __launch_bounds__(32 * kExpandWarps<kDim>, (kExpandBlocks<kDim>)) void ExpandKernel(
    const __grid_constant__ ExpandPagesParams params, uint32_t num_units) {
  extern __shared__ __align__(16) std::byte memory[];
  auto& shared = *reinterpret_cast<ExpandShared<kDim>*>(memory);
  const auto begin = static_cast<uint32_t>(uint64_t{num_units} * blockIdx.x / gridDim.x);
  const auto end = static_cast<uint32_t>(uint64_t{num_units} * (blockIdx.x + 1) / gridDim.x);
  ExpandBlock<kDim>(params, shared).Run(begin, end);
}

}  // namespace crumb::gpu
