// SPDX-License-Identifier: Apache-2.0
//
// The units of expansion: where their codes come from and their rows go to, and how a block walks
// over its share of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "crumb/cuda/expand_pages.h"
#include "cuda/kernels/mma.cuh"
#include "cuda/kernels/page_unit.cuh"
#include "proto/page/page_format.h"

namespace crumb::gpu {

// Division by a number that stays the same.
class Divider {
 public:
  __device__ __forceinline__ explicit Divider(uint32_t by) : by_(by), inverse_(0xffffffffu / by) {}
  __device__ __forceinline__ uint32_t Quotient(uint32_t x) const {
    const uint32_t about = __umulhi(x, inverse_);  // One too few at times.
    return about + (x - about * by_ >= by_ ? 1 : 0);
  }

 private:
  uint32_t by_;
  uint32_t inverse_;
};

// What the block table says of a row; it is read long before it is used, as that takes a while.
struct RowPlace {
  static constexpr uint32_t kNowhere = 0xffffffff;
  int32_t block;
  uint32_t in_block;  // kNowhere: the row is not to be written.
};

// Where a unit's codes come from and its rows go to.
class ExpandUnit : public PageUnit {
 public:
  using PageUnit::PageUnit;

  // Its page, null where the table has none; read early, likewise.
  __device__ __forceinline__ const std::byte* source(const ExpandPagesParams& params) const {
    return params.int2.pages[page];
  }
  // Where in a page its head block is.
  __device__ __forceinline__ size_t block_offset(const ExpandPagesParams& params) const {
    return params.int2.offset + layer * params.int2.layer_stride + head * params.int2.head_stride;
  }
  __device__ __forceinline__ const std::byte* record(const ExpandPagesParams& params) const {
    return PageUnit::record(params.heads, params.first_layer, params.first_head);
  }
  __device__ __forceinline__ RowPlace PlaceOf(const ExpandPagesParams& params,
                                              const Divider& by_block_tokens,
                                              uint32_t row) const {
    const uint32_t token = page * kPageTokens + row;
    const uint32_t position = params.first_position + token;
    const uint32_t index = by_block_tokens.Quotient(position);
    const bool is_wanted = row < kPageTokens && token < params.num_tokens;
    return {.block = is_wanted ? params.block_table[index] : 0,
            .in_block = is_wanted ? position - index * params.block_tokens : RowPlace::kNowhere};
  }
};

// Rows of K or of V of one layer and head in the cache.
class ExpandRows {
 public:
  ExpandRows() = default;
  __device__ __forceinline__ ExpandRows(const ExpandPagesParams& params, const ExpandUnit& unit) {
    const DevicePagedRows& to = unit.is_value ? params.values : params.keys;
    std::byte* layer = to.layers[unit.layer];
    first_ = layer == nullptr ? nullptr : layer + to.offset + unit.head * to.head_stride;
    block_stride_ = to.block_stride;
    token_stride_ = to.token_stride;
  }

  // Null: nowhere; counted, if the row is to be written. has_page: its page is there.
  __device__ __forceinline__ std::byte* At(const ExpandPagesParams& params,
                                           const RowPlace& place,
                                           bool has_page) const {
    if (place.in_block == RowPlace::kNowhere) {
      return nullptr;
    }
    if (!has_page || first_ == nullptr || place.block < 0 ||
        static_cast<uint32_t>(place.block) >= params.num_blocks) {
      atomicAdd(reinterpret_cast<unsigned long long*>(params.rows_left_out), 1ull);
      return nullptr;
    }
    return first_ + static_cast<size_t>(place.block) * block_stride_ +
           place.in_block * token_stride_;
  }

 private:
  std::byte* first_;  // Of block 0; null where the table has no such layer.
  size_t block_stride_;
  size_t token_stride_;
};

// Starts to copy codes and meta of K or V to `to`, of the head block at `block`; zeros if the page
// is not there.
template <int kDim, int kThreads>
__device__ __forceinline__ void LoadPartAsync(std::byte* to,
                                              const std::byte* block,
                                              bool is_value,
                                              bool is_there) {
  constexpr Int2HeadBlock kFormat{kDim, kDim};
  constexpr int kCodeChunks = static_cast<int>(kFormat.key_codes_bytes() / 16);
  constexpr int kMetaChunks = static_cast<int>(kFormat.meta_bytes() / 16);
  static_assert(kCodeChunks <= kThreads, "a thread has a chunk of 16 bytes at most");
  const int i = static_cast<int>(threadIdx.x);
  block += i * 16;
  to += i * 16;
  if (kCodeChunks == kThreads || i < kCodeChunks) {
    CopyAsync16OrZeros(
        to, block + (is_value ? kFormat.value_codes_offset() : kFormat.key_codes_offset()),
        is_there);
  }
  if (i < kMetaChunks) {
    CopyAsync16OrZeros(to + kCodeChunks * 16,
                       block + (is_value ? kFormat.value_meta_offset() : kFormat.key_meta_offset()),
                       is_there);
  }
}

// Units on their way through shared memory.
template <int kDim>
struct ExpandTransit {
  static constexpr Int2HeadBlock kFormat{kDim, kDim};
  static constexpr uint32_t kCodesBytes = static_cast<uint32_t>(kFormat.key_codes_bytes());
  static constexpr uint32_t kPartBytes = kCodesBytes + static_cast<uint32_t>(kFormat.meta_bytes());

  alignas(16) std::byte parts[2][kPartBytes];  // As loaded: codes, then meta. Units take turns.
  std::byte* targets[kPageTokens];             // Of the rows; null: not to be written.
};

// Units [begin, end) of the line: calls take_head(unit) when a unit has another matrix than the one
// before, and expand(is_value, part, look_ahead) with its codes and meta, which calls look_ahead()
// once, where a read of a table may be waited for least; all threads. Loads of the next unit
// are under way meanwhile. A thread finds the target of row `row` of each, if there is one; other
// threads see it after the caller's next barrier with them.
template <int kDim, int kThreads, typename TakeHead, typename Expand>
__device__ __forceinline__ void WalkUnits(const ExpandPagesParams& params,
                                          const UnitLine& line,
                                          uint32_t begin,
                                          uint32_t end,
                                          uint32_t row,
                                          ExpandTransit<kDim>& transit,
                                          TakeHead&& take_head,
                                          Expand&& expand) {
  if (begin == end) {
    return;
  }
  const Divider by_block_tokens(params.block_tokens);
  ExpandUnit unit(line, begin);  // Of its head's units any.
  ExpandUnit next = unit;
  const std::byte* source = next.source(params);
  size_t block_offset = next.block_offset(params);
  bool has_page = false;  // The last one asked for.
  const auto load_next = [&](uint32_t index) {
    has_page = source != nullptr;
    LoadPartAsync<kDim, kThreads>(transit.parts[(index - begin) % 2], source + block_offset,
                                  next.is_value, has_page);
    CommitCopies();
  };
  bool next_is_of_new_head = false;
  const auto advance = [&] {
    next_is_of_new_head = !next.Advance(line);
    if (next_is_of_new_head) {
      block_offset = next.block_offset(params);
    }
    source = next.source(params);
  };
  load_next(begin);
  RowPlace place = next.PlaceOf(params, by_block_tokens, row);
  ExpandRows rows;
  bool is_of_new_head = true;
  advance();
  for (uint32_t index = begin; index < end; ++index) {
    if (is_of_new_head) {
      rows = ExpandRows(params, unit);
      take_head(unit);
    }
    WaitForCopies<0>();
    __syncthreads();
    if (row < kPageTokens) {
      transit.targets[row] = rows.At(params, place, has_page);
    }
    if (index + 1 < end) {
      load_next(index + 1);
    }
    expand(unit.is_value, transit.parts[(index - begin) % 2],
           [&] { place = next.PlaceOf(params, by_block_tokens, row); });
    is_of_new_head = next_is_of_new_head;
    if (is_of_new_head) {
      unit = next;
    }
    advance();
  }
}

}  // namespace crumb::gpu
