// SPDX-License-Identifier: Apache-2.0
#include "cuda/reference/demote_problem.h"

#include "absl/strings/str_cat.h"

#include "proto/page/page_format.h"

namespace crumb {

namespace gpu {

absl::Status NonFiniteRowError(const DemotePagesParams& params, uint64_t position) {
  const uint64_t token = position % kPageTokens;
  const uint64_t part = position / kPageTokens;
  const uint64_t head = part / 2 % params.num_heads;
  const uint64_t layer = part / 2 / params.num_heads % params.num_layers;
  const uint64_t page = part / 2 / params.num_heads / params.num_layers;
  return absl::InvalidArgumentError(absl::StrCat(
      part % 2 == 0 ? "K" : "V", " holds NaN or inf at page ", page, " of the launch, ", "layer ",
      params.first_layer + layer, ", KV head ", params.first_head + head, ", token ", token,
      " of the page; a page takes finite values only: recompute it, do not cache it"));
}

absl::Status NullPageError(const DemotePagesParams& params, const char* table, uint64_t page) {
  return absl::InvalidArgumentError(
      absl::StrCat(table, ".pages[", page, "] is null; it must be the address of a page, as all ",
                   params.num_pages, " of the launch: what it was to become is not written"));
}

}  // namespace gpu

}  // namespace crumb
