// SPDX-License-Identifier: Apache-2.0
//
// What softmax does with the rows of a text, as far as statistics need it. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cuda/calibrate/attention_rows.h"

namespace crumb::calibrate {

// The first key that a query at `position` sees; `window` as Statistics::attention_windows.
constexpr size_t FirstKeySeen(size_t position, uint32_t window) {
  return window == 0 || position + 1 <= window ? 0 : position + 1 - window;
}

// [T]: the attention that each key of a KV head gets as history, see statistics.h.
std::vector<double> HistoryMass(const TokenRows& queries,
                                const TokenRows& keys,
                                size_t kv_head,
                                uint32_t window);

// Of one query at `position`: writes its output [dv] and returns the logarithm of its softmax's
// sum.
float Attend(std::span<const float> query,
             size_t position,
             uint32_t window,
             const HeadView& keys,
             const HeadView& values,
             std::span<float> output);

}  // namespace crumb::calibrate
