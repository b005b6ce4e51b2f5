// SPDX-License-Identifier: Apache-2.0
//
// What demotion does at a time: the 64 rows of K or of V of one page, layer and head. Units stand
// in one line, pages fastest, and each block has a contiguous share, so that it keeps a head's
// matrix over many pages.
#pragma once

#include <cstddef>
#include <cstdint>

#include "crumb/cuda/demote_pages.h"
#include "cuda/launch/head_record.h"
#include "proto/page/page_format.h"

namespace crumb::gpu {

// Unit `index` of a launch.
class DemoteUnit {
 public:
  uint32_t page;
  bool is_value;
  uint32_t head;   // Counted from params.first_head.
  uint32_t layer;  // Counted from params.first_layer.

  // Unit `index` of a launch.
  __device__ __forceinline__ DemoteUnit(const DemotePagesParams& params, uint32_t index)
      : page(index % params.num_pages), pair_(index / params.num_pages) {
    Split(params);
  }
  // The next one; whether it has the same matrix.
  __device__ __forceinline__ bool Advance(const DemotePagesParams& params) {
    if (++page < params.num_pages) {
      return true;
    }
    page = 0;
    ++pair_;
    Split(params);
    return false;
  }

  __device__ __forceinline__ const DeviceRows& rows(const DemotePagesParams& params) const {
    return is_value ? params.values : params.keys;
  }
  __device__ __forceinline__ const std::byte* first_row(const DemotePagesParams& params) const {
    const DeviceRows& from = rows(params);
    return from.pages[page] + from.offset + layer * from.layer_stride + head * from.head_stride;
  }
  // The head block that it becomes a part of.
  __device__ __forceinline__ std::byte* block(const DemotePagesParams& params) const {
    const DeviceBlocks& to = params.int2;
    return to.pages[page] + to.offset + layer * to.layer_stride + head * to.head_stride;
  }
  // The parameters of its head.
  __device__ __forceinline__ const std::byte* record(const DemotePagesParams& params,
                                                     const HeadRecord& layout) const {
    return params.heads.records + (size_t{params.first_layer + layer} * params.heads.num_kv_heads +
                                   params.first_head + head) *
                                      layout.bytes();
  }

  // A row that is not finite. Positions count as a reader would look: pages, layers, heads, K
  // before V, tokens. The finding is the largest of complements: zero is none, and the first wins.
  __device__ __forceinline__ void Report(const DemotePagesParams& params, int token) const {
    const uint64_t part =
        ((uint64_t{page} * params.num_layers + layer) * params.num_heads + head) * 2;
    const uint64_t position =
        (part + (is_value ? 1 : 0)) * kPageTokens + static_cast<uint32_t>(token);
    uint64_t* finding = params.finding + (params.has_finding_per_page ? page : 0);
    atomicMax(reinterpret_cast<unsigned long long*>(finding),
              static_cast<unsigned long long>(~position));
  }

 private:
  __device__ __forceinline__ void Split(const DemotePagesParams& params) {
    is_value = pair_ % 2 != 0;
    head = pair_ / 2 % params.num_heads;
    layer = pair_ / 2 / params.num_heads;
  }

  uint32_t pair_;  // Of K and V, heads, layers: K's or V's pages of one head.
};

// Where a block's share begins; the one after the last begins where all units end. Shares are of
// equal cost, of which a page of keys has `key_cost` and one of values 1.
__device__ __forceinline__ uint32_t FirstUnitOf(const DemotePagesParams& params,
                                                uint32_t block,
                                                uint32_t key_cost) {
  const uint64_t keys = uint64_t{params.num_pages} * key_cost;
  const uint64_t head = keys + params.num_pages;
  const uint64_t cost = head * params.num_heads * params.num_layers * block / gridDim.x;
  const uint64_t rest = cost % head;
  const uint64_t of_head = rest < keys ? rest / key_cost : params.num_pages + rest - keys;
  return static_cast<uint32_t>(cost / head * 2 * params.num_pages + of_head);
}

}  // namespace crumb::gpu
