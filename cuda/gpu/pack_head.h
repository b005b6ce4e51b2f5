// SPDX-License-Identifier: Apache-2.0
//
// A head's parameters as the kernels' record of them. Host arithmetic, no CUDA.
#pragma once

#include <cstddef>
#include <span>

#include "crumb/cuda/profile.h"
#include "cuda/launch/head_record.h"

namespace crumb::gpu {

// `record` has HeadRecord{head.key_dim, is_aware}.bytes(); key_dim == value_dim.
void PackHead(const HeadParameters& head, bool is_aware, std::span<std::byte> record);

}  // namespace crumb::gpu
