// SPDX-License-Identifier: Apache-2.0
#include "client/example/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace crumb::example {

absl::StatusOr<Sampler> Sampler::Create(const SamplerOptions& options) {
  if (!std::isfinite(options.temperature) || options.temperature < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("temperature ", options.temperature, " must be 0 (greedy) or more"));
  }
  if (!(options.top_p > 0) || options.top_p > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("top_p ", options.top_p, " must be above 0 and at most 1"));
  }
  return Sampler(options);
}

uint32_t Sampler::Sample(std::span<const float> logits) {
  if (options_.temperature == 0) {
    return static_cast<uint32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
  ranked_.clear();
  for (uint32_t token = 0; token < logits.size(); ++token) {
    ranked_.emplace_back(logits[token], token);
  }
  std::sort(ranked_.begin(), ranked_.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  const auto weight = [&](size_t rank) {
    return std::exp(double{ranked_[rank].first - ranked_[0].first} / options_.temperature);
  };
  double total = 0;
  for (size_t rank = 0; rank < ranked_.size(); ++rank) {
    total += weight(rank);
  }
  double kept = 0;
  size_t num_kept = 0;
  while (num_kept < ranked_.size() && kept < total * options_.top_p) {
    kept += weight(num_kept++);
  }
  // 53 random bits: the standard's distributions differ from library to library.
  double left = static_cast<double>(random_() >> 11) * 0x1p-53 * kept;
  size_t rank = 0;
  while (rank + 1 < num_kept && (left -= weight(rank)) >= 0) {
    ++rank;
  }
  return ranked_[rank].second;
}

}  // namespace crumb::example
