// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch/split_decode.cuh"

namespace crumb::gpu {

const SplitDecodeForm kSplitDecode128 = MakeSplitDecodeForm<128, 4>();

}  // namespace crumb::gpu
