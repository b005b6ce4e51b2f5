// SPDX-License-Identifier: Apache-2.0
//
// A Llama model on the CPU. It keeps weights and scratch memory; what it remembers of a text, the
// keys and values, is in a crumb::Sequence, which holds them at two bits and may share them.
//
// This is the part to read to see where libcrumb goes in an engine: Forward calls Append and Attend
// once a layer, and nothing else of the model knows about the cache.
//
// Thread-compatible; uses its own worker threads inside.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "client/example/gguf_file.h"
#include "client/example/llama_ops.h"
#include "client/example/llama_weights.h"
#include "client/example/worker_team.h"
#include "crumb/sequence.h"

namespace crumb::example {

// Sees what attention is given, for collecting statistics.
class AttentionObserver {
 public:
  virtual ~AttentionObserver() = default;
  // Queries [num_tokens, num_heads, head_dim] and keys [num_tokens, num_kv_heads, head_dim] after
  // RoPE, values as keys; of the tokens from `first_position` on.
  virtual absl::Status Observe(uint32_t layer,
                               uint32_t first_position,
                               std::span<const float> queries,
                               std::span<const float> keys,
                               std::span<const float> values) = 0;
};

class LlamaModel {
 public:
  // Reads all weights as floats: four bytes a parameter. Errors as LlamaConfig and LlamaWeights.
  static absl::StatusOr<std::unique_ptr<LlamaModel>> Load(const GgufFile& file,
                                                          uint32_t num_threads);

  const LlamaConfig& config() const { return config_; }

  // Runs the model over the next `tokens` of a text, one chunk of `sequence`, which was made for
  // this model's geometry. Returns their last hidden states, normalised, [num_tokens,
  // embedding_dim], valid until the next call. On an error the sequence is as before the call.
  // INVALID_ARGUMENT: a token beyond the vocabulary. Otherwise as Sequence.
  absl::StatusOr<std::span<const float>> Forward(std::span<const uint32_t> tokens,
                                                 Sequence& sequence,
                                                 AttentionObserver* observer = nullptr);

  // The logits of hidden states [n, embedding_dim]: `out` [n, vocabulary_size].
  void Logits(std::span<const float> hidden, std::span<float> out);

 private:
  LlamaModel(const LlamaConfig& config, LlamaWeights weights, uint32_t num_threads);
  void Reserve(uint32_t num_tokens);
  absl::Status Embed(std::span<const uint32_t> tokens);
  absl::Status Attention(uint32_t layer, uint32_t num_tokens, Sequence& s, AttentionObserver* o);
  void FeedForward(uint32_t layer, uint32_t num_tokens);
  void SplitHeads(uint32_t num_tokens);

  const LlamaConfig config_;
  const LlamaWeights weights_;
  RotaryEmbedding rotary_;
  WorkerTeam team_;

  // Of the chunk at hand; the first dimension is num_tokens.
  std::vector<float> residual_;    // [embedding_dim]
  std::vector<float> normalised_;  // [embedding_dim]
  std::vector<float> projected_;   // [query_dim + 2 * kv_dim], then [2 * feed_forward_dim]
  std::vector<float> queries_;     // [query_dim]
  std::vector<float> keys_;        // [kv_dim]
  std::vector<float> values_;      // [kv_dim]
  std::vector<float> mixed_;       // [query_dim], then [feed_forward_dim]
  std::vector<float> delta_;       // [embedding_dim], what a block adds to the residual
};

}  // namespace crumb::example
