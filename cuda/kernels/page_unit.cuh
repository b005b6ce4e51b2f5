// SPDX-License-Identifier: Apache-2.0
//
// What the page ops do at a time, a unit: the K or the V of one page, layer and head. Units stand
// in one line, pages fastest, then K and V, heads, layers; each block has a contiguous share of
// them, so that it keeps a head's matrices over many pages.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "crumb/cuda/device_profile.h"
#include "cuda/launch/head_record.h"

namespace crumb::gpu {

// Of head blocks, what the line of units has.
enum class PageParts : uint32_t { kKeysAndValues, kKeys, kValues };

struct UnitLine {
  uint32_t num_pages;
  uint32_t num_heads;
  PageParts parts;
  bool tapers = false;  // Shares get shorter along the line.

  __host__ __device__ uint32_t num_parts() const {
    return parts == PageParts::kKeysAndValues ? 2 : 1;
  }
  __host__ __device__ uint32_t num_units(uint32_t num_layers) const {
    return num_pages * num_parts() * num_heads * num_layers;
  }
};

class PageUnit {
 public:
  uint32_t page;
  bool is_value;
  uint32_t head;   // Counted from the launch's first.
  uint32_t layer;  // Likewise.

  // Unit `index` of a line.
  __device__ __forceinline__ PageUnit(const UnitLine& line, uint32_t index)
      : page(index % line.num_pages), part_(index / line.num_pages) {
    Split(line);
  }
  // The next one; whether it has the same matrices.
  __device__ __forceinline__ bool Advance(const UnitLine& line) {
    if (++page < line.num_pages) {
      return true;
    }
    page = 0;
    ++part_;
    Split(line);
    return false;
  }

  // The parameters of its head, of a launch that begins with these of the profile's.
  __device__ __forceinline__ const std::byte* record(const DeviceHeads& heads,
                                                     uint32_t first_layer,
                                                     uint32_t first_head) const {
    const HeadRecord layout{heads.head_dim, heads.is_aware, heads.is_tilted};
    return heads.records +
           (size_t{first_layer + layer} * heads.num_kv_heads + first_head + head) * layout.bytes();
  }

 private:
  __device__ __forceinline__ void Split(const UnitLine& line) {
    is_value = line.parts == PageParts::kValues ||
               (line.parts == PageParts::kKeysAndValues && part_ % 2 != 0);
    const uint32_t of_head = part_ / line.num_parts();
    head = of_head % line.num_heads;
    layer = of_head / line.num_heads;
  }

  uint32_t part_;  // Of K and V, heads, layers: K's or V's pages of one head.
};

// Where a block's share of `num_units` begins; the one after the last begins where all units end.
// Shares that taper shrink from one and a half of the mean to half of it: blocks are started in
// this order, so they end at nearly the same time, whatever each has lost on the way.
__device__ __forceinline__ uint32_t FirstUnitOf(const UnitLine& line,
                                                uint32_t num_units,
                                                uint32_t block) {
  if (line.tapers) {
    const double x = static_cast<double>(block) / gridDim.x;
    return static_cast<uint32_t>(num_units * (x * (3 - x)) / 2);
  }
  return static_cast<uint32_t>(uint64_t{num_units} * block / gridDim.x);
}

// How many blocks share a line that `at_a_time` blocks work on: several for each of those, since
// they take unequal time, but none of less than `units_of_share`, so short that loading its
// matrices counts.
inline uint32_t ShareOut(UnitLine& line,
                         uint32_t num_layers,
                         uint32_t at_a_time,
                         uint32_t units_of_share) {
  const uint32_t units = line.num_units(num_layers);
  const auto turns = static_cast<uint32_t>(units / (uint64_t{at_a_time} * units_of_share));
  line.tapers = turns > 1;
  return turns > 1 ? turns * at_a_time : at_a_time < units ? at_a_time : units;
}

}  // namespace crumb::gpu
