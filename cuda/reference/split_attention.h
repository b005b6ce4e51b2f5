// SPDX-License-Identifier: Apache-2.0
//
// The readable twin of split attention, in double: all scores, one softmax, one weighted sum.
#pragma once

#include "crumb/cuda/split_attention.h"

namespace crumb::reference {

// As crumb::SplitAttention, for parameters that it has checked.
void SplitAttention(const SplitAttentionParams& params);

}  // namespace crumb::reference
