// SPDX-License-Identifier: Apache-2.0
//
// A Llama model that fits in a test.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tests/client/example/gguf_builder.h"

namespace crumb::example {

// One layer, embedding 64, two query heads and one KV head of 32, feed-forward 96.
struct TinyLlama {
  std::string architecture = "llama";
  uint32_t num_heads = 2;
  uint32_t num_kv_heads = 1;
  uint32_t rope_dims = 32;
  std::string without;  // A tensor to leave out.
  std::string extra;    // A tensor to add.
  uint64_t down_columns = 96;
  uint32_t vocabulary_size = 3;
  bool random = false;  // Weights of a normal distribution instead of one value a tensor.

  std::string Build() const {
    GgufBuilder builder;
    builder.Key("general.architecture", architecture)
        .Key("llama.block_count", uint32_t{1})
        .Key("llama.embedding_length", uint32_t{64})
        .Key("llama.attention.head_count", num_heads)
        .Key("llama.attention.head_count_kv", num_kv_heads)
        .Key("llama.rope.dimension_count", rope_dims)
        .Key("llama.feed_forward_length", uint32_t{96})
        .Key("llama.context_length", uint32_t{2048})
        .Key("llama.rope.freq_base", 10000.0f)
        .Key("llama.attention.layer_norm_rms_epsilon", 1e-5f)
        .Key("tokenizer.ggml.tokens", std::vector<std::string>(vocabulary_size, "x"));
    std::mt19937 generator(1);
    std::normal_distribution<float> normal(0, 0.2f);
    const auto add = [&](const std::string& name, const std::vector<uint64_t>& dims, float value) {
      if (name == without) {
        return;
      }
      std::vector<float> values(dims.size() == 1 ? dims[0] : dims[0] * dims[1], value);
      if (random) {
        std::generate(values.begin(), values.end(), [&] { return normal(generator); });
      }
      builder.FloatTensor(name, dims, values);
    };
    add("token_embd.weight", {64, vocabulary_size}, 1);
    add("output_norm.weight", {64}, 2);
    add("blk.0.attn_norm.weight", {64}, 3);
    add("blk.0.attn_q.weight", {64, 64}, 4);
    add("blk.0.attn_k.weight", {64, 32}, 5);
    add("blk.0.attn_v.weight", {64, 32}, 6);
    add("blk.0.attn_output.weight", {64, 64}, 7);
    add("blk.0.ffn_norm.weight", {64}, 8);
    add("blk.0.ffn_gate.weight", {64, 96}, 9);
    add("blk.0.ffn_up.weight", {64, 96}, 10);
    add("blk.0.ffn_down.weight", {down_columns, 64}, 11);
    if (!extra.empty()) {
      add(extra, {64}, 12);
    }
    return builder.Build();
  }
};

}  // namespace crumb::example
