// SPDX-License-Identifier: Apache-2.0
//
// How split decode is cut into blocks. Apart from the op so that tests and benchmarks can try cuts
// that it would not choose.
#pragma once

#include "absl/status/status.h"

#include "crumb/cuda/decode_params.h"
#include "crumb/cuda/device.h"
#include "cuda/launch/split_decode.h"

namespace crumb::gpu {

// The form for a head_dim; null if there is none.
const SplitDecodeForm* SplitDecodeFormOf(uint32_t head_dim);

// For a valid shape.
DecodeGrid ChooseSplitDecodeGrid(const SplitDecodeParams& params, const GpuDevice& device);

// The workspace that any grid of at most `num_blocks` blocks needs.
size_t DecodeWorkspaceBytes(const SplitDecodeParams& params, uint32_t num_blocks);

// As SplitDecode, cut as `grid` says.
absl::Status SplitDecodeOnGrid(const SplitDecodeParams& params,
                               const DecodeGrid& grid,
                               GpuStream stream);

}  // namespace crumb::gpu
