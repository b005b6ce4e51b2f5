// SPDX-License-Identifier: Apache-2.0
//
// The units of demotion: where their rows come from and go to.
#pragma once

#include <cstddef>
#include <cstdint>

#include "crumb/cuda/demote_pages.h"
#include "cuda/kernels/page_unit.cuh"
#include "proto/page/page_format.h"

namespace crumb::gpu {

class DemoteUnit : public PageUnit {
 public:
  using PageUnit::PageUnit;

  __device__ __forceinline__ const DeviceRows& rows(const DemotePagesParams& params) const {
    return is_value ? params.values : params.keys;
  }
  __device__ __forceinline__ const std::byte* first_row(const DemotePagesParams& params) const {
    return FirstRow(params, source(params));
  }
  // The head block that it becomes a part of.
  __device__ __forceinline__ std::byte* block(const DemotePagesParams& params) const {
    const DeviceBlocks& to = params.int2;
    return to.pages[page] + to.offset + layer * to.layer_stride + head * to.head_stride;
  }
  // The first row in two steps, for callers that read the table long before they use it.
  __device__ __forceinline__ const std::byte* source(const DemotePagesParams& params) const {
    return rows(params).pages[page];
  }
  __device__ __forceinline__ const std::byte* FirstRow(const DemotePagesParams& params,
                                                       const std::byte* source) const {
    const DeviceRows& from = rows(params);
    return source + from.offset + layer * from.layer_stride + head * from.head_stride;
  }
  __device__ __forceinline__ const std::byte* record(const DemotePagesParams& params) const {
    return PageUnit::record(params.heads, params.first_layer, params.first_head);
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
};

}  // namespace crumb::gpu
