// SPDX-License-Identifier: Apache-2.0
//
// What a codec does to one head's attention on the rows that statistics hold: keys and values go
// through demotion and expansion as in the service, and the change of each query's output is
// estimated, the sink and the recent window being exact as they are in use.
//
// A query's output changes by the sum over its history of x_t = p_t [e^d_t (v'_t - o) - (v_t - o)],
// over what softmax's sum has grown to; p_t is the key's probability, d_t the change of its score,
// o the output. Of the N keys of the history n are in the sample, and their changes count as if
// they knew nothing of each other: N/n sum |x_t|^2. What the changes of values have in common is
// added: their mean, and the part that grows with the value, both over all rows of the sample. (The
// sum of products x_s . x_t would need no such model, but its noise is N/n times what is measured:
// docs/design/quality.md.)
//
// Immutable once made; Thread-safe.
#pragma once

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"

#include "crumb/cuda/profile.h"
#include "crumb/cuda/statistics.h"
#include "cuda/calibrate/attention_error.h"
#include "proto/page/usable_length.h"

namespace crumb::calibrate {

// Over the queries of either half of the sample: texts by turns, or rows by turns if there is one
// text. What is chosen on one half can be checked on the other.
struct HalvesError {
  AttentionError half[2];
  AttentionError all;  // Their mean, weighted by how large outputs are.
  // The mean over queries of the output's error by its size, at most 1 each: a sampled key of great
  // weight stands for N / n of them, which says little of how much more than all was lost.
  double bounded_output = 0;
  // The geometric mean over the queries instead (but for scores): a mean is made by the few queries
  // that read few keys, whose error is chance; this says which recipe rounds better.
  AttentionError typical_half[2];
  AttentionError typical;
};

class ReservoirProbe {
 public:
  // Of head `block`, layer by layer. The statistics need not outlive the probe; their reservoir is
  // not empty.
  ReservoirProbe(const Statistics& statistics, size_t block);
  ~ReservoirProbe();
  ReservoirProbe(const ReservoirProbe&) = delete;
  ReservoirProbe& operator=(const ReservoirProbe&) = delete;

  // The sample's rows as `head` stores them. INVALID_ARGUMENT: rows that bf16 makes infinite.
  absl::StatusOr<StoredRows> Store(const HeadParameters& head) const;
  // What attention over them loses with these windows exact. A sink below kFirstKeyToken counts as
  // that: the sample has no rows before it.
  HalvesError Measure(const StoredRows& stored, const Windows& windows) const;

 private:
  struct Scene;
  struct State;
  std::unique_ptr<const State> state_;
};

}  // namespace crumb::calibrate
