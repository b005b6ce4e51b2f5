// SPDX-License-Identifier: Apache-2.0
//
// How well the model predicts text through a given cache: what the codec costs in quality.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "absl/status/statusor.h"

#include "client/example/llama_model.h"
#include "crumb/cuda/profile.h"

namespace crumb::example {

struct PerplexityOptions {
  std::shared_ptr<const Profile> profile = nullptr;  // shared: as Sequence's.
  bool keep_all_bf16 = false;                        // The baseline: no row at two bits.
  uint32_t num_threads = 1;
  // Tokens a chunk. A page a chunk gives each query the recent window that it has in decode: longer
  // chunks see more rows in BF16 than they would have, and flatter the codec.
  uint32_t chunk_tokens = 64;
  // Predictions count from the token at this position on, where most of the context is history.
  uint32_t scored_from = 1024;
};

struct Likelihood {
  double negative_log_likelihood = 0;  // Natural, summed.
  uint64_t num_predictions = 0;

  void Add(const Likelihood& other) {
    negative_log_likelihood += other.negative_log_likelihood;
    num_predictions += other.num_predictions;
  }
  double Perplexity() const;
};

// The likelihood of one text. `progress` is called with tokens as they are done; may be empty.
absl::StatusOr<Likelihood> ScoreText(LlamaModel& model,
                                     std::span<const uint32_t> text,
                                     const PerplexityOptions& options,
                                     const std::function<void(uint32_t)>& progress);

}  // namespace crumb::example
