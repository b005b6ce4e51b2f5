// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/demote_pages.h"
#include "cuda/launch/demote_finding.h"
#include "cuda/reference/demote_problem.h"

namespace crumb {

absl::Status DescribeDemoteFinding(const DemotePagesParams& params, uint64_t finding) {
  if (finding == 0) {
    return absl::OkStatus();
  }
  if ((finding & gpu::kNullPageBit) == 0) {
    return gpu::NonFiniteRowError(params, ~finding & ~gpu::kNullPageBit);
  }
  // As DemoteTable numbers them.
  constexpr const char* kTables[gpu::kNumDemoteTables] = {"keys", "values", "int2"};
  return gpu::NullPageError(params, kTables[~finding % gpu::kNumDemoteTables],
                            ~finding / gpu::kNumDemoteTables);
}

}  // namespace crumb
