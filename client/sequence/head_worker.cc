// SPDX-License-Identifier: Apache-2.0
#include "client/sequence/head_worker.h"

#include <algorithm>
#include <span>

#include "crumb/cuda/rotate.h"
#include "crumb/cuda/split_attention.h"

namespace crumb {
namespace {

// Dense copies of rows of `width` elements, in `scratch` unless they are dense already.
std::span<const float> Gather(StridedRows<const float> rows,
                              size_t num_rows,
                              size_t width,
                              std::vector<float>* scratch) {
  if (rows.stride == width || num_rows == 1) {
    return {rows.data, num_rows * width};
  }
  scratch->resize(std::max(scratch->size(), num_rows * width));
  for (size_t row = 0; row < num_rows; ++row) {
    std::copy_n(rows.data + row * rows.stride, width, scratch->data() + row * width);
  }
  return {scratch->data(), num_rows * width};
}

uint32_t CountFiniteRows(const BFloat16* rows, uint32_t num_rows, size_t width) {
  for (uint32_t row = 0; row < num_rows; ++row) {
    const BFloat16* first = rows + row * width;
    if (!std::all_of(first, first + width, [](BFloat16 value) { return value.IsFinite(); })) {
      return row;
    }
  }
  return num_rows;
}

}  // namespace

std::optional<uint32_t> HeadWorker::RotateRows(const HeadParameters& head,
                                               uint32_t num_rows,
                                               StridedRows<const float> keys,
                                               StridedRows<const float> values,
                                               BFloat16* keys_out,
                                               BFloat16* values_out) {
  RotateKeys(head, Gather(keys, num_rows, head.key_dim, &rows_),
             {keys_out, size_t{num_rows} * head.key_dim});
  RotateValues(head, Gather(values, num_rows, head.value_dim, &rows_),
               {values_out, size_t{num_rows} * head.value_dim});
  // Looking at the result finds both a bad input, which spreads over its whole row, and a row that
  // left the range of bfloat16 in the rotation.
  const uint32_t finite = std::min(CountFiniteRows(keys_out, num_rows, head.key_dim),
                                   CountFiniteRows(values_out, num_rows, head.value_dim));
  return finite < num_rows ? std::optional(finite) : std::nullopt;
}

absl::Status HeadWorker::Attend(const HeadParameters& head,
                                const PageTable& pages,
                                const Query& query) {
  const size_t num_rows = size_t{query.num_queries} * query.group;
  const size_t query_width = size_t{query.group} * head.key_dim;
  const size_t out_width = size_t{query.group} * head.value_dim;
  rotated_.resize(std::max(rotated_.size(), num_rows * head.key_dim));
  out_.resize(std::max(out_.size(), 2 * num_rows * head.value_dim));
  const std::span<float> rotated(rotated_.data(), num_rows * head.key_dim);
  const std::span<float> out(out_.data(), num_rows * head.value_dim);
  const std::span<float> unrotated(out_.data() + out.size(), out.size());

  RotateQueries(head, Gather(query.queries, query.num_queries, query_width, &rows_), rotated);
  pages.CollectRegions(query.num_tokens, query.layer, query.head, &regions_);
  const SplitAttentionParams params{.key_dim = head.key_dim,
                                    .value_dim = head.value_dim,
                                    .num_queries = query.num_queries,
                                    .group = query.group,
                                    .scale = query.scale,
                                    .queries = rotated.data(),
                                    .history = regions_.history,
                                    .windows = regions_.windows,
                                    .out = out.data(),
                                    .lse = nullptr};
  if (absl::Status status = SplitAttention(params); !status.ok()) {
    return status;
  }
  UnrotateOutputs(head, out, unrotated);
  for (size_t row = 0; row < query.num_queries; ++row) {
    std::copy_n(unrotated.data() + row * out_width, out_width,
                query.out.data + row * query.out.stride);
  }
  return absl::OkStatus();
}

}  // namespace crumb
