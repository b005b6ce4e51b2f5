// SPDX-License-Identifier: Apache-2.0
//
// What demotion leaves in a word of DemotePagesParams::finding. Of several findings the largest
// stays: null pages before rows, then the first as a reader would look. 0 is none. Arithmetic for
// host and device.
#pragma once

#include <cstdint>

namespace crumb::gpu {

// Of DemotePagesParams, a table of pages.
enum class DemoteTable : uint32_t { kKeys, kValues, kInt2 };
inline constexpr uint32_t kNumDemoteTables = 3;

inline constexpr uint64_t kNullPageBit = uint64_t{1} << 63;

// A row that is not finite; `position` counts (page, layer, head, K or V, token) of the launch,
// tokens fastest.
constexpr uint64_t NonFiniteRowFinding(uint64_t position) {
  return ~position & ~kNullPageBit;
}
// A page that a table has no address of.
constexpr uint64_t NullPageFinding(uint32_t page, DemoteTable table) {
  return ~(uint64_t{page} * kNumDemoteTables + static_cast<uint32_t>(table));
}

}  // namespace crumb::gpu
