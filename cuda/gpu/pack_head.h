// SPDX-License-Identifier: Apache-2.0
//
// A head's parameters as the kernels' record of them. Host arithmetic, no CUDA.
#pragma once

#include <cstddef>
#include <span>

#include "crumb/cuda/profile.h"
#include "cuda/launch/head_record.h"

namespace crumb::gpu {

HeadRecord RecordOf(const HeadParameters& head);

// `record` has RecordOf(head).bytes(); key_dim == value_dim. For oscar-int2-tilted the metric is
// taken from the feedback factor, of which it is the inverse square.
void PackHead(const HeadParameters& head, std::span<std::byte> record);

}  // namespace crumb::gpu
