// SPDX-License-Identifier: Apache-2.0
//
// What demotion says of rows and pages that it refuses.
#pragma once

#include "absl/status/status.h"

#include "crumb/cuda/demote_pages.h"

namespace crumb::gpu {

// `position` counts (page, layer, head, K or V, token) of the launch, tokens fastest.
absl::Status NonFiniteRowError(const DemotePagesParams& params, uint64_t position);

// `table` as the params call it.
absl::Status NullPageError(const DemotePagesParams& params, const char* table, uint64_t page);

}  // namespace crumb::gpu
