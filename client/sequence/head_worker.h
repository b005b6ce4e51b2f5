// SPDX-License-Identifier: Apache-2.0
//
// What one thread of a Sequence does for one KV head: rotate new rows into their page, and attend
// with a block of queries. Owns the thread's scratch memory, which grows to the largest block seen.
//
// Confined to one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"

#include "client/sequence/page_table.h"
#include "crumb/cuda/profile.h"
#include "proto/base/bfloat16.h"

namespace crumb {

// Rows of one head inside an array over all heads: row i starts at data + i * stride.
template <typename T>
struct StridedRows {
  T* data = nullptr;
  size_t stride = 0;  // In elements.
};

class HeadWorker {
 public:
  // Rotates `num_rows` rows of keys and values into dense BF16 rows. Returns the first row that is
  // not finite, before or after rotation; the rows written are then worthless.
  std::optional<uint32_t> RotateRows(const HeadParameters& head,
                                     uint32_t num_rows,
                                     StridedRows<const float> keys,
                                     StridedRows<const float> values,
                                     BFloat16* keys_out,
                                     BFloat16* values_out);

  struct Query {
    uint32_t layer = 0;
    uint32_t head = 0;         // In the rank.
    uint32_t num_queries = 0;  // Tokens.
    uint32_t num_tokens = 0;   // That the last query sees, itself included.
    uint32_t group = 0;        // Query heads of this KV head, adjacent in a row.
    float scale = 0;
    StridedRows<const float> queries;  // [num_queries] rows of [group, key_dim].
    StridedRows<float> out;            // [num_queries] rows of [group, value_dim].
  };
  // Causal attention of the last num_queries of num_tokens positions; in and out as the model has
  // them, unrotated.
  absl::Status Attend(const HeadParameters& head, const PageTable& pages, const Query& query);

 private:
  std::vector<float> rows_;     // Gathered from strided memory.
  std::vector<float> rotated_;  // Queries.
  std::vector<float> out_;      // Rotated, then not.
  PageTable::Regions regions_;
};

}  // namespace crumb
