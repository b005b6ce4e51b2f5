// SPDX-License-Identifier: Apache-2.0
//
// What a Llama-architecture GGUF file says about its model, and its weights as float matrices.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

#include "client/example/gguf_file.h"
#include "client/example/matmul.h"
#include "proto/page/geometry.h"

namespace crumb::example {

struct LlamaConfig {
  uint32_t num_layers = 0;
  uint32_t embedding_dim = 0;
  uint32_t num_heads = 0;     // Of queries.
  uint32_t num_kv_heads = 0;  // Divides num_heads.
  uint32_t head_dim = 0;
  uint32_t feed_forward_dim = 0;
  uint32_t vocabulary_size = 0;
  uint32_t context_length = 0;  // That the model was trained for.
  float rope_base = 0;
  float norm_epsilon = 0;

  // INVALID_ARGUMENT names the key, its value and what was expected; another architecture than
  // "llama", and RoPE that is scaled, by name.
  static absl::StatusOr<LlamaConfig> FromGguf(const GgufFile& file);

  Geometry geometry() const { return {num_layers, num_kv_heads, head_dim, head_dim}; }
  uint32_t query_dim() const { return num_heads * head_dim; }
  uint32_t kv_dim() const { return num_kv_heads * head_dim; }
};

// A matrix of floats that owns them.
struct Matrix {
  std::vector<float> data;  // [rows, columns]
  uint32_t rows = 0;
  uint32_t columns = 0;

  MatrixView view() const { return {data.data(), rows, columns}; }
};

// Matrices are [outputs, inputs]. Those that read the same input are stacked, so that one product
// does for all of them.
struct LlamaLayer {
  std::vector<float> attention_norm;     // [embedding_dim]
  Matrix query_key_value;                // [query_dim + 2 * kv_dim, embedding_dim]
  Matrix attention_output;               // [embedding_dim, query_dim]
  std::vector<float> feed_forward_norm;  // [embedding_dim]
  Matrix gate_up;                        // [2 * feed_forward_dim, embedding_dim]
  Matrix down;                           // [embedding_dim, feed_forward_dim]
};

struct LlamaWeights {
  Matrix token_embedding;  // [vocabulary_size, embedding_dim]
  std::vector<LlamaLayer> layers;
  std::vector<float> output_norm;  // [embedding_dim]
  Matrix output;                   // As token_embedding; empty when they are tied.
  std::vector<float>
      rope_factors;  // [head_dim / 2]: frequencies are divided by these; may be empty.

  const Matrix& output_or_tied() const { return output.rows > 0 ? output : token_embedding; }

  // INVALID_ARGUMENT names a tensor that is missing, of another shape, or that a Llama model does
  // not have.
  static absl::StatusOr<LlamaWeights> FromGguf(const GgufFile& file, const LlamaConfig& config);
};

}  // namespace crumb::example
