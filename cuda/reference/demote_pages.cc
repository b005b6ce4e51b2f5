// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/demote_pages.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cuda/reference/demote.h"
#include "cuda/reference/demote_problem.h"
#include "cuda/reference/rotate.h"
#include "proto/base/status_macros.h"
#include "proto/page/page_format.h"

namespace crumb {
namespace {

using Rows = std::vector<BFloat16>;

bool IsFinite(const BFloat16* row, uint32_t dim) {
  return std::all_of(row, row + dim, [](BFloat16 x) { return x.IsFinite(); });
}

// Token by token, into stored form; the first token that is not finite, else kPageTokens.
uint32_t Gather(const std::byte* first,
                size_t token_stride,
                const float* rotation,  // Null: as they are.
                std::span<const float> mean,
                uint32_t dim,
                Rows& rows) {
  rows.resize(size_t{kPageTokens} * dim);
  std::vector<float> row(dim);
  std::vector<float> rotated(dim);
  for (uint32_t token = 0; token < kPageTokens; ++token) {
    BFloat16* out = rows.data() + size_t{token} * dim;
    std::memcpy(out, first + token * token_stride, dim * sizeof(BFloat16));
    if (rotation != nullptr) {
      std::transform(out, out + dim, row.begin(), [](BFloat16 x) { return x.ToFloat(); });
      reference::RotateRow(row, mean, {rotation, size_t{dim} * dim}, rotated);
      std::transform(rotated.begin(), rotated.end(), out, BFloat16::FromFloat);
    }
    if (!IsFinite(out, dim)) {
      return token;
    }
  }
  return kPageTokens;
}

absl::Status CheckTables(const DemotePagesParams& params) {
  for (uint32_t page = 0; page < params.num_pages; ++page) {
    if (params.keys.pages[page] == nullptr) {
      return gpu::NullPageError(params, "keys", page);
    }
    if (params.values.pages[page] == nullptr) {
      return gpu::NullPageError(params, "values", page);
    }
    if (params.int2.pages[page] == nullptr) {
      return gpu::NullPageError(params, "int2", page);
    }
  }
  return absl::OkStatus();
}

const std::byte* FirstRow(const DeviceRows& rows, uint32_t page, uint32_t layer, uint32_t head) {
  return rows.pages[page] + rows.offset + layer * rows.layer_stride + head * rows.head_stride;
}

}  // namespace

absl::Status DemotePagesReference(const DemotePagesParams& params,
                                  std::span<const HeadParameters> heads) {
  CRUMB_RETURN_IF_ERROR(CheckTables(params));
  const uint32_t dim = params.heads.head_dim;
  Rows keys;
  Rows values;
  const uint64_t parts = uint64_t{params.num_pages} * params.num_layers * params.num_heads;
  for (uint64_t part = 0; part < parts; ++part) {
    const auto head = static_cast<uint32_t>(part % params.num_heads);
    const auto layer = static_cast<uint32_t>(part / params.num_heads % params.num_layers);
    const auto page = static_cast<uint32_t>(part / params.num_heads / params.num_layers);
    const HeadParameters& parameters =
        heads[size_t{params.first_layer + layer} * params.heads.num_kv_heads + params.first_head +
              head];
    const bool rotate = !params.rows_are_rotated;
    uint32_t bad =
        Gather(FirstRow(params.keys, page, layer, head), params.keys.token_stride,
               rotate ? parameters.key_rotation : nullptr, {parameters.key_mean, dim}, dim, keys);
    if (bad < kPageTokens) {
      return gpu::NonFiniteRowError(params, part * 2 * kPageTokens + bad);
    }
    bad = Gather(FirstRow(params.values, page, layer, head), params.values.token_stride,
                 rotate ? parameters.value_rotation : nullptr, {}, dim, values);
    if (bad < kPageTokens) {
      return gpu::NonFiniteRowError(params, (part * 2 + 1) * kPageTokens + bad);
    }
    reference::DemoteHeadBlock(
        parameters, keys, values,
        {params.int2.pages[page] + params.int2.offset + layer * params.int2.layer_stride +
             head * params.int2.head_stride,
         Int2HeadBlock{dim, dim}.bytes()});
  }
  return absl::OkStatus();
}

}  // namespace crumb
