// SPDX-License-Identifier: Apache-2.0
//
// Chooses the next token from logits: the most likely one, or one drawn from the most likely ones
// with a seed. Thread-compatible.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace crumb::example {

struct SamplerOptions {
  float temperature = 0;  // 0: greedy. Otherwise logits are divided by it.
  float top_p = 1;        // Only the fewest tokens that have this much probability together.
  uint64_t seed = 0;      // Equal seeds and logits draw equal tokens, on every machine.
};

class Sampler {
 public:
  // INVALID_ARGUMENT: a negative or non-finite temperature, top_p outside (0, 1].
  static absl::StatusOr<Sampler> Create(const SamplerOptions& options);

  // `logits` has at least one element; ties go to the lower token.
  uint32_t Sample(std::span<const float> logits);

 private:
  explicit Sampler(const SamplerOptions& options) : options_(options), random_(options.seed) {}

  SamplerOptions options_;
  std::mt19937_64 random_;
  std::vector<std::pair<float, uint32_t>> ranked_;  // Scratch: (logit, token).
};

}  // namespace crumb::example
