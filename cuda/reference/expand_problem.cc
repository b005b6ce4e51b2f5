// SPDX-License-Identifier: Apache-2.0
#include "cuda/reference/expand_problem.h"

#include "absl/strings/str_cat.h"

namespace crumb::gpu {

absl::Status CheckRowsLeftOut(const ExpandPagesParams& params, uint64_t rows) {
  if (rows == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "expansion left out ", rows, " rows of K and V: their page or their layer of the cache is ",
      "null, or their entry of the block table is not one of the cache's ", params.num_blocks,
      " blocks; give it all pages and layers, and a table of all positions written"));
}

}  // namespace crumb::gpu
