// SPDX-License-Identifier: Apache-2.0
//
// Demotion: rotated BF16 rows of one page to an INT2 head block (page format v1).
//
// Values, and keys under oscar-int2: clip at the order statistic floor(ratio * dim) of |row| (as
// its fp16 rounding), one affine range a row, round to nearest. Under oscar-int2-lm, and values
// where the profile says so: codes by the row's mean and deviation, with the scale and minimum
// under which it comes back as large as it was (docs/decisions/0104). Keys under oscar-int2-aware:
// for the whole range and three clipped ones (kKeyRanges, or the profile's), round channel after
// channel with error feedback through key_feedback and keep the range of least loss (GPTQ, arXiv
// 2210.17323, applied to rows of K with the metric E[q q^T]). See docs/design/codec.md.
//
// Deterministic: the bytes depend on the input alone, not on the path, the machine or the thread.
#pragma once

#include <cstddef>
#include <span>

#include "absl/status/status.h"

#include "crumb/cuda/cpu_path.h"
#include "crumb/cuda/profile.h"
#include "proto/base/bfloat16.h"
#include "proto/page/head_range.h"

namespace crumb {

// `keys` [kPageTokens, key_dim] and `values` [kPageTokens, value_dim], rotated; `block` has
// Int2HeadBlock{key_dim, value_dim}.bytes(). INVALID_ARGUMENT for NaN or inf, naming K or V, the
// token within the page and the channel; `block` is untouched then. Blocking, Thread-safe.
absl::Status DemoteHeadBlock(const HeadParameters& head,
                             std::span<const BFloat16> keys,
                             std::span<const BFloat16> values,
                             std::span<std::byte> block,
                             CpuPath path = BestCpuPath());

// KV heads `heads` of one page, their count written out: `bf16` holds those heads' BF16 head blocks
// and `int2` receives their INT2 head blocks, both [kv_head][layer]. Errors as above, also
// naming layer, head and the token's position (`first_token` is the page's).
absl::Status DemotePage(const Profile& profile,
                        HeadRange heads,
                        uint32_t first_token,
                        std::span<const std::byte> bf16,
                        std::span<std::byte> int2,
                        CpuPath path = BestCpuPath());

// Rotates the rows of plain BF16 head blocks (as the model made them, keys after RoPE) into stored
// form, same heads and order, `plain` and `stored` of equal length and not overlapping. Errors as
// DemotePage.
absl::Status RotatePage(const Profile& profile,
                        HeadRange heads,
                        uint32_t first_token,
                        std::span<const std::byte> plain,
                        std::span<std::byte> stored,
                        CpuPath path = BestCpuPath());

}  // namespace crumb
