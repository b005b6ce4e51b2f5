// SPDX-License-Identifier: Apache-2.0
#include "cuda/reference/split_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "proto/base/float16.h"
#include "proto/page/page_format.h"

namespace crumb::reference {
namespace {

// All rows that the last query sees, in double: history first, then windows.
struct Cache {
  std::vector<double> keys;    // [num_tokens, key_dim]
  std::vector<double> values;  // [num_tokens, value_dim]
  size_t num_tokens = 0;
};

double Decode(const std::byte* block, CodePosition position, size_t meta_byte) {
  uint16_t words[2];
  std::memcpy(words, block + meta_byte, sizeof(words));
  const uint32_t code = (std::to_integer<uint32_t>(block[position.byte]) >> position.shift) & 3u;
  return double{Float16{words[0]}.ToFloat()} * code + double{Float16{words[1]}.ToFloat()};
}

Cache ReadCache(const SplitAttentionParams& params) {
  const Int2HeadBlock format{params.key_dim, params.value_dim};
  Cache cache;
  for (const std::byte* block : params.history) {
    for (uint32_t token = 0; token < kPageTokens; ++token) {
      for (uint32_t channel = 0; channel < params.key_dim; ++channel) {
        cache.keys.push_back(
            Decode(block, format.KeyCode(token, channel), format.KeyMetaByte(token)));
      }
      for (uint32_t channel = 0; channel < params.value_dim; ++channel) {
        cache.values.push_back(
            Decode(block, format.ValueCode(token, channel), format.ValueMetaByte(token)));
      }
    }
    cache.num_tokens += kPageTokens;
  }
  for (const Bf16Rows& rows : params.windows) {
    for (size_t i = 0; i < size_t{rows.num_tokens} * params.key_dim; ++i) {
      cache.keys.push_back(double{rows.keys[i].ToFloat()});
    }
    for (size_t i = 0; i < size_t{rows.num_tokens} * params.value_dim; ++i) {
      cache.values.push_back(double{rows.values[i].ToFloat()});
    }
    cache.num_tokens += rows.num_tokens;
  }
  return cache;
}

}  // namespace

void SplitAttention(const SplitAttentionParams& params) {
  const Cache cache = ReadCache(params);
  const size_t key_dim = params.key_dim;
  const size_t value_dim = params.value_dim;
  for (uint32_t row = 0; row < params.num_queries * params.group; ++row) {
    const uint32_t query_token = row / params.group;
    const size_t visible = cache.num_tokens - (params.num_queries - 1 - query_token);
    std::vector<double> weights(visible);
    for (size_t token = 0; token < visible; ++token) {
      double score = 0;
      for (size_t channel = 0; channel < key_dim; ++channel) {
        score +=
            double{params.queries[row * key_dim + channel]} * cache.keys[token * key_dim + channel];
      }
      weights[token] = score * double{params.scale};
    }
    const double highest = *std::max_element(weights.begin(), weights.end());
    double sum = 0;
    for (double& weight : weights) {
      weight = std::exp(weight - highest);
      sum += weight;
    }
    for (size_t channel = 0; channel < value_dim; ++channel) {
      double output = 0;
      for (size_t token = 0; token < visible; ++token) {
        output += weights[token] * cache.values[token * value_dim + channel];
      }
      params.out[row * value_dim + channel] = static_cast<float>(output / sum);
    }
    if (params.lse != nullptr) {
      params.lse[row] = static_cast<float>(highest + std::log(sum));
    }
  }
}

}  // namespace crumb::reference
