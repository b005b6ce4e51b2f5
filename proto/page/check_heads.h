// SPDX-License-Identifier: Apache-2.0
//
// The check of a rank's KV heads, as every option of that kind makes it.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"

#include "proto/page/head_range.h"

namespace crumb {

// Of a range whose count is written out. INVALID_ARGUMENT names `option`, the range and the limit.
absl::Status CheckHeads(std::string_view option, const HeadRange& heads, uint32_t num_kv_heads);

}  // namespace crumb
