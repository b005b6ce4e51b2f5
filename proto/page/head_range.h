// SPDX-License-Identifier: Apache-2.0
//
// Which KV heads of every layer a tensor-parallel rank holds. They are one contiguous run of a page
// image, and one run of bits in PageHeader::heads_present.
#pragma once

#include <cstdint>

namespace crumb {

// The KV heads [first, first + count) that an engine rank holds of every layer.
struct HeadRange {
  uint32_t first = 0;
  uint32_t count = 0;  // 0: all.
  friend constexpr bool operator==(const HeadRange&, const HeadRange&) = default;

  // The same range with its count written out. Valid if it lies within `num_kv_heads`.
  constexpr HeadRange Resolve(uint32_t num_kv_heads) const {
    return count == 0 && first == 0 ? HeadRange{0, num_kv_heads} : *this;
  }
  constexpr bool IsWithin(uint32_t num_kv_heads) const {
    return count >= 1 && first < num_kv_heads && count <= num_kv_heads - first;
  }
  // Bit h for each head h. The range must be within 64 heads.
  constexpr uint64_t Mask() const {
    return (count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1) << first;
  }
};

}  // namespace crumb
