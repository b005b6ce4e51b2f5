// SPDX-License-Identifier: Apache-2.0
//
// The readable twin of demotion: what the codec means, one formula after the other. In float and in
// the order of operations that the codec fixes, so that every fast path gives the same bytes; it
// shares the page format's index arithmetic with them and nothing else.
#pragma once

#include <cstddef>
#include <span>

#include "crumb/cuda/profile.h"
#include "proto/base/bfloat16.h"

namespace crumb::reference {

// As crumb::DemoteHeadBlock, for finite rows.
void DemoteHeadBlock(const HeadParameters& head,
                     std::span<const BFloat16> keys,
                     std::span<const BFloat16> values,
                     std::span<std::byte> block);

}  // namespace crumb::reference
