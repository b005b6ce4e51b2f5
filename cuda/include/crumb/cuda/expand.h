// SPDX-License-Identifier: Apache-2.0
//
// Expansion: an INT2 head block back to BF16 rows, for engines without a two-bit kernel and for
// measuring what the codec costs.
#pragma once

#include <cstddef>
#include <span>

#include "crumb/cuda/cpu_path.h"
#include "crumb/cuda/profile.h"
#include "proto/base/bfloat16.h"

namespace crumb {

enum class ExpandSpace {
  kRotated,  // As stored.
  kModel,    // Rotated back, key mean added: comparable with what the model made.
};

// `keys` [kPageTokens, key_dim], `values` [kPageTokens, value_dim]. Any bytes are valid input (a
// non-finite scale gives non-finite rows). Blocking, Thread-safe.
void ExpandHeadBlock(const HeadParameters& head,
                     std::span<const std::byte> block,
                     ExpandSpace space,
                     std::span<BFloat16> keys,
                     std::span<BFloat16> values,
                     CpuPath path = BestCpuPath());

}  // namespace crumb
