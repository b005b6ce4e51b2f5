// SPDX-License-Identifier: Apache-2.0
#include "client/example/perplexity.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "crumb/sequence.h"
#include "proto/base/status_macros.h"

namespace crumb::example {
namespace {

// -log softmax(logits)[token].
double NegativeLogLikelihood(std::span<const float> logits, uint32_t token) {
  const float peak = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) {
    sum += std::exp(logit - peak);
  }
  return std::log(sum) + peak - logits[token];
}

}  // namespace

double Likelihood::Perplexity() const {
  return std::exp(negative_log_likelihood / static_cast<double>(num_predictions));
}

absl::StatusOr<Likelihood> ScoreText(LlamaModel& model,
                                     std::span<const uint32_t> text,
                                     const PerplexityOptions& options,
                                     const std::function<void(uint32_t)>& progress) {
  CRUMB_ASSIGN_OR_RETURN(const std::unique_ptr<Sequence> sequence,
                         Sequence::Create({.profile = options.profile,
                                           .num_query_heads = model.config().num_heads,
                                           .num_threads = options.num_threads,
                                           .keep_all_bf16 = options.keep_all_bf16}));
  const size_t embedding_dim = model.config().embedding_dim;
  const size_t vocabulary_size = model.config().vocabulary_size;
  Likelihood likelihood;
  std::vector<float> logits;
  for (size_t start = 0; start < text.size(); start += options.chunk_tokens) {
    const size_t count = std::min<size_t>(options.chunk_tokens, text.size() - start);
    CRUMB_ASSIGN_OR_RETURN(const std::span<const float> hidden,
                           model.Forward(text.subspan(start, count), *sequence));
    // Rows [first, last) of the chunk predict the token after them; the text's last predicts none.
    const size_t first = std::clamp<size_t>(options.scored_from, start, start + count) - start;
    const size_t last = std::min(start + count, text.size() - 1) - start;
    if (first < last) {
      logits.resize((last - first) * vocabulary_size);
      model.Logits(hidden.subspan(first * embedding_dim, (last - first) * embedding_dim), logits);
    }
    for (size_t row = first; row < last; ++row) {
      likelihood.negative_log_likelihood += NegativeLogLikelihood(
          std::span(logits).subspan((row - first) * vocabulary_size, vocabulary_size),
          text[start + row + 1]);
      ++likelihood.num_predictions;
    }
    if (progress) {
      progress(static_cast<uint32_t>(count));
    }
  }
  return likelihood;
}

}  // namespace crumb::example
