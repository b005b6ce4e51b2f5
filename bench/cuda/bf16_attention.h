// SPDX-License-Identifier: Apache-2.0
//
// The yardstick of split attention: decode attention of one KV head over BF16 keys and values,
// written with the same care. Queries and probabilities enter as bfloat16, as in the usual flash
// kernels, through the processor's bfloat16 dot product (AVX512_BF16); elsewhere the yardstick is
// SplitAttention itself over BF16 rows alone.
#pragma once

#include <cstddef>

#include "proto/base/bfloat16.h"

namespace crumb::bench {

struct Bf16AttentionParams {
  const float* queries = nullptr;  // [4, 128]
  // Pages anywhere in memory, as an engine's are: keys [64, 128], then values [64, 128].
  const BFloat16* const* pages = nullptr;
  size_t num_pages = 0;
  float scale = 0;
  float* out = nullptr;  // [4, 128]
};

bool HasAvx512Bf16();
// Four query heads, head_dim 128. Needs HasAvx512Bf16().
void Bf16AttentionAvx512(const Bf16AttentionParams& params);

}  // namespace crumb::bench
