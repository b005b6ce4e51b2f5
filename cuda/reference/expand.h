// SPDX-License-Identifier: Apache-2.0
//
// The readable twin of expansion: rows in float as stored, back to the model's space in double.
#pragma once

#include <cstddef>
#include <span>

#include "crumb/cuda/expand.h"
#include "crumb/cuda/profile.h"
#include "proto/base/bfloat16.h"

namespace crumb::reference {

// As crumb::ExpandHeadBlock.
void ExpandHeadBlock(const HeadParameters& head,
                     std::span<const std::byte> block,
                     ExpandSpace space,
                     std::span<BFloat16> keys,
                     std::span<BFloat16> values);

}  // namespace crumb::reference
