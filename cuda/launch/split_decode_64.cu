// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch/split_decode.cuh"

namespace crumb::gpu {

const SplitDecodeForm kSplitDecode64 = MakeSplitDecodeForm<64, 4>();

}  // namespace crumb::gpu
