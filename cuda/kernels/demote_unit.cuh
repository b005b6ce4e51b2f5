// SPDX-License-Identifier: Apache-2.0
//
// The units of demotion: where their rows come from and go to.
#pragma once

#include <cstddef>
#include <cstdint>

#include "crumb/cuda/demote_pages.h"
#include "cuda/kernels/page_unit.cuh"
#include "cuda/launch/demote_finding.h"
#include "proto/page/page_format.h"

namespace crumb::gpu {

class DemoteUnit : public PageUnit {
 public:
  using PageUnit::PageUnit;

  __device__ __forceinline__ const DeviceRows& rows(const DemotePagesParams& params) const {
    return is_value ? params.values : params.keys;
  }
  // The pages that its rows are in and that it becomes a part of; null where the tables have none.
  __device__ __forceinline__ const std::byte* source(const DemotePagesParams& params) const {
    return rows(params).pages[page];
  }
  __device__ __forceinline__ std::byte* target(const DemotePagesParams& params) const {
    return params.int2.pages[page];
  }
  // Where in them its first row and its head block are.
  __device__ __forceinline__ size_t FirstRowOffset(const DeviceRows& from) const {
    return from.offset + layer * from.layer_stride + head * from.head_stride;
  }
  __device__ __forceinline__ size_t BlockOffset(const DeviceBlocks& to) const {
    return to.offset + layer * to.layer_stride + head * to.head_stride;
  }
  __device__ __forceinline__ const std::byte* record(const DemotePagesParams& params) const {
    return PageUnit::record(params.heads, params.first_layer, params.first_head);
  }

  // A row that is not finite, or whose page is null.
  __device__ __forceinline__ void Refuse(const DemotePagesParams& params, int token) const {
    if (source(params) == nullptr) {
      ReportNullPage(params);
      return;
    }
    const uint64_t part =
        ((uint64_t{page} * params.num_layers + layer) * params.num_heads + head) * 2;
    Leave(params, NonFiniteRowFinding((part + (is_value ? 1 : 0)) * kPageTokens +
                                      static_cast<uint32_t>(token)));
  }
  // One of its pages is null.
  __device__ __forceinline__ void ReportNullPage(const DemotePagesParams& params) const {
    const DemoteTable table = source(params) != nullptr ? DemoteTable::kInt2
                              : is_value                ? DemoteTable::kValues
                                                        : DemoteTable::kKeys;
    Leave(params, NullPageFinding(page, table));
  }

 private:
  __device__ __forceinline__ void Leave(const DemotePagesParams& params, uint64_t what) const {
    uint64_t* finding = params.finding + (params.has_finding_per_page ? page : 0);
    atomicMax(reinterpret_cast<unsigned long long*>(finding),
              static_cast<unsigned long long>(what));
  }
};

}  // namespace crumb::gpu
