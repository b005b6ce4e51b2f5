// SPDX-License-Identifier: Apache-2.0
#include "client/example/llama_model.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/example/matmul.h"
#include "proto/base/status_macros.h"

namespace crumb::example {

absl::StatusOr<std::unique_ptr<LlamaModel>> LlamaModel::Load(const GgufFile& file,
                                                             uint32_t num_threads) {
  CRUMB_ASSIGN_OR_RETURN(const LlamaConfig config, LlamaConfig::FromGguf(file));
  CRUMB_ASSIGN_OR_RETURN(LlamaWeights weights, LlamaWeights::FromGguf(file, config));
  return std::unique_ptr<LlamaModel>(new LlamaModel(config, std::move(weights), num_threads));
}

LlamaModel::LlamaModel(const LlamaConfig& config, LlamaWeights weights, uint32_t num_threads)
    : config_(config),
      weights_(std::move(weights)),
      rotary_(config.head_dim, config.rope_base, weights_.rope_factors),
      team_(num_threads) {}

absl::StatusOr<std::span<const float>> LlamaModel::Forward(std::span<const uint32_t> tokens,
                                                           Sequence& sequence,
                                                           AttentionObserver* observer) {
  const auto num_tokens = static_cast<uint32_t>(tokens.size());
  Reserve(num_tokens);
  CRUMB_RETURN_IF_ERROR(Embed(tokens));
  rotary_.SetPositions(sequence.length(), num_tokens);

  CRUMB_RETURN_IF_ERROR(sequence.BeginChunk(num_tokens));
  for (uint32_t layer = 0; layer < config_.num_layers; ++layer) {
    if (absl::Status status = Attention(layer, num_tokens, sequence, observer); !status.ok()) {
      sequence.AbandonChunk();
      return status;
    }
    FeedForward(layer, num_tokens);
  }
  CRUMB_RETURN_IF_ERROR(sequence.EndChunk());

  RmsNorm(residual_, weights_.output_norm, config_.norm_epsilon, normalised_);
  return std::span<const float>(normalised_);
}

void LlamaModel::Logits(std::span<const float> hidden, std::span<float> out) {
  const auto num_tokens = static_cast<uint32_t>(hidden.size() / config_.embedding_dim);
  MatMul(weights_.output_or_tied().view(), hidden.data(), num_tokens, out.data(), team_);
}

void LlamaModel::Reserve(uint32_t num_tokens) {
  const LlamaConfig& c = config_;
  residual_.resize(size_t{num_tokens} * c.embedding_dim);
  normalised_.resize(residual_.size());
  delta_.resize(residual_.size());
  projected_.resize(size_t{num_tokens} *
                    std::max(c.query_dim() + 2 * c.kv_dim(), 2 * c.feed_forward_dim));
  queries_.resize(size_t{num_tokens} * c.query_dim());
  keys_.resize(size_t{num_tokens} * c.kv_dim());
  values_.resize(keys_.size());
  mixed_.resize(size_t{num_tokens} * std::max(c.query_dim(), c.feed_forward_dim));
}

absl::Status LlamaModel::Embed(std::span<const uint32_t> tokens) {
  const size_t dim = config_.embedding_dim;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= config_.vocabulary_size) {
      return absl::InvalidArgumentError(absl::StrCat("token ", tokens[i], " at index ", i,
                                                     " is beyond the vocabulary of ",
                                                     config_.vocabulary_size, " tokens"));
    }
    std::copy_n(weights_.token_embedding.data.begin() + static_cast<ptrdiff_t>(tokens[i] * dim),
                dim, residual_.begin() + static_cast<ptrdiff_t>(i * dim));
  }
  return absl::OkStatus();
}

absl::Status LlamaModel::Attention(uint32_t layer,
                                   uint32_t num_tokens,
                                   Sequence& sequence,
                                   AttentionObserver* observer) {
  const LlamaLayer& weights = weights_.layers[layer];
  RmsNorm(residual_, weights.attention_norm, config_.norm_epsilon, normalised_);
  MatMul(weights.query_key_value.view(), normalised_.data(), num_tokens, projected_.data(), team_);
  SplitHeads(num_tokens);
  if (observer != nullptr) {
    CRUMB_RETURN_IF_ERROR(observer->Observe(layer, sequence.length(), queries_, keys_, values_));
  }

  // All that the cache asks of an engine.
  CRUMB_RETURN_IF_ERROR(sequence.Append(layer, keys_, values_));
  CRUMB_RETURN_IF_ERROR(sequence.Attend(layer, queries_, std::span(mixed_).first(queries_.size())));

  MatMul(weights.attention_output.view(), mixed_.data(), num_tokens, delta_.data(), team_);
  Accumulate(delta_, residual_);
  return absl::OkStatus();
}

// Takes a row [queries | keys | values] apart and turns queries and keys to their positions.
void LlamaModel::SplitHeads(uint32_t num_tokens) {
  const size_t query_dim = config_.query_dim();
  const size_t kv_dim = config_.kv_dim();
  for (size_t token = 0; token < num_tokens; ++token) {
    const float* row = projected_.data() + token * (query_dim + 2 * kv_dim);
    std::copy_n(row, query_dim, queries_.data() + token * query_dim);
    std::copy_n(row + query_dim, kv_dim, keys_.data() + token * kv_dim);
    std::copy_n(row + query_dim + kv_dim, kv_dim, values_.data() + token * kv_dim);
  }
  for (uint32_t head = 0; head < config_.num_heads; ++head) {
    rotary_.Apply(queries_.data() + size_t{head} * config_.head_dim, config_.query_dim());
  }
  for (uint32_t head = 0; head < config_.num_kv_heads; ++head) {
    rotary_.Apply(keys_.data() + size_t{head} * config_.head_dim, config_.kv_dim());
  }
}

void LlamaModel::FeedForward(uint32_t layer, uint32_t num_tokens) {
  const LlamaLayer& weights = weights_.layers[layer];
  const uint32_t dim = config_.feed_forward_dim;
  RmsNorm(residual_, weights.feed_forward_norm, config_.norm_epsilon, normalised_);
  MatMul(weights.gate_up.view(), normalised_.data(), num_tokens, projected_.data(), team_);
  const uint32_t share = (num_tokens + team_.num_workers() - 1) / team_.num_workers();
  team_.Run([&](uint32_t worker) {
    const size_t first = std::min(num_tokens, worker * share);
    const size_t count = std::min<size_t>(num_tokens - first, share);
    SwiGlu(std::span(projected_).subspan(first * 2 * dim, count * 2 * dim), dim,
           std::span(mixed_).subspan(first * dim, count * dim));
  });
  MatMul(weights.down.view(), mixed_.data(), num_tokens, delta_.data(), team_);
  Accumulate(delta_, residual_);
}

}  // namespace crumb::example
