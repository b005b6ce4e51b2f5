// SPDX-License-Identifier: Apache-2.0
//
// The feedback factor of a head's keys as the kernels' record of it, and what oscar-int2-tilted
// refits by. Host arithmetic, no CUDA.
#pragma once

#include <cstddef>
#include <span>

#include "crumb/cuda/profile.h"
#include "cuda/launch/head_record.h"

namespace crumb::gpu {

// Of a head with feedback. Fills the parts from HeadRecord::diagonal() on, but for the queries'
// rotation, and the scalars that belong to them.
void PackFeedback(const HeadParameters& head, std::span<std::byte> record, HeadScalars* scalars);

}  // namespace crumb::gpu
