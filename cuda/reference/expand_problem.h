// SPDX-License-Identifier: Apache-2.0
//
// What expansion says of rows that it could not write.
#pragma once

#include "absl/status/status.h"

#include "crumb/cuda/expand_pages.h"

namespace crumb::gpu {

// OK for none.
absl::Status CheckRowsLeftOut(const ExpandPagesParams& params, uint64_t rows);

}  // namespace crumb::gpu
