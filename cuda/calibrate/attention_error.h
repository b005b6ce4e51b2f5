// SPDX-License-Identifier: Apache-2.0
//
// What a codec does to attention: rows go through demotion and expansion as in the service, and
// the output over them is held against the output over the rows as they were. Thread-safe.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"

#include "crumb/cuda/profile.h"

namespace crumb::calibrate {

// Each a mean square over that of the exact thing: 0 is no loss, 1 is as bad as zeros.
struct AttentionError {
  double output = 0;  // The attention output; K and V at two bits.
  double keys = 0;    // The output, with V exact.
  double values = 0;  // The output, with K exact.
  double scores = 0;  // q . k, less its mean over the keys, which softmax does not see.
};

// Rows as they come back from two-bit pages, in the model's coordinates.
struct StoredRows {
  std::vector<float> keys;    // [n, key_dim]
  std::vector<float> values;  // [n, value_dim]
};
// `key_rows` [n, key_dim] and `value_rows` [n, value_dim], n a multiple of kPageTokens.
// INVALID_ARGUMENT as DemoteHeadBlock: rows that are not finite.
absl::StatusOr<StoredRows> ThroughPages(const HeadParameters& head,
                                        std::span<const float> key_rows,
                                        std::span<const float> value_rows);

// The attention of one query head: dense rows, scores over sqrt(key_dim), every query sees every
// key.
struct AttentionSample {
  size_t key_dim = 0;
  size_t value_dim = 0;
  std::vector<float> queries;  // [num_queries, key_dim]
  std::vector<float> keys;     // [num_keys, key_dim]; num_keys a multiple of kPageTokens
  std::vector<float> values;   // [num_keys, value_dim]
};

class AttentionProbe {
 public:
  explicit AttentionProbe(AttentionSample sample);
  ~AttentionProbe();
  AttentionProbe(const AttentionProbe&) = delete;
  AttentionProbe& operator=(const AttentionProbe&) = delete;

  // `head` is of the sample's dims. INVALID_ARGUMENT as DemoteHeadBlock: rows that are not finite.
  absl::StatusOr<AttentionError> Measure(const HeadParameters& head) const;

 private:
  struct Exact;
  std::unique_ptr<const Exact> exact_;
};

}  // namespace crumb::calibrate
