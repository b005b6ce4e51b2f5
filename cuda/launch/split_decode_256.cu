// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch/split_decode.cuh"

namespace crumb::gpu {

const SplitDecodeForm kSplitDecode256 = MakeSplitDecodeForm<256, 2>();

}  // namespace crumb::gpu
