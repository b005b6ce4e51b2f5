// SPDX-License-Identifier: Apache-2.0
#include "tests/cuda/calibrate/synthetic.h"

#include <cmath>
#include <random>
#include <span>

namespace crumb {
namespace {

using Normal = std::normal_distribution<float>;

// One head's way of drawing rows: row = mean + sum_i noise_i scale_i direction_i.
struct Source {
  size_t dim;
  std::vector<float> mean;        // [dim]
  std::vector<float> scale;       // [dim]
  std::vector<float> directions;  // [dim, dim]; not orthogonal, which does not matter here.

  void Draw(std::mt19937* random, std::span<float> row) const {
    Normal normal;
    for (size_t k = 0; k < dim; ++k) {
      row[k] = mean[k];
    }
    for (size_t i = 0; i < dim; ++i) {
      const float amount = normal(*random) * scale[i];
      for (size_t k = 0; k < dim; ++k) {
        row[k] += amount * directions[i * dim + k];
      }
    }
  }
};

// Scales fall from 1 to 1/`decades` powers of ten; `loudness` multiplies a few channels.
Source MakeSource(size_t dim, float decades, float mean_size, float loudness, uint32_t seed) {
  std::mt19937 random(seed);
  Normal normal;
  Source source{.dim = dim, .mean = {}, .scale = {}, .directions = {}};
  const auto loud = [&](size_t channel) { return channel % 16 == seed % 16 ? loudness : 1.0F; };
  for (size_t k = 0; k < dim; ++k) {
    source.mean.push_back(mean_size * normal(random) * loud(k));
    source.scale.push_back(
        std::pow(10.0F, -decades * static_cast<float>(k) / static_cast<float>(dim)));
  }
  for (size_t i = 0; i < dim * dim; ++i) {
    source.directions.push_back(normal(random) / std::sqrt(static_cast<float>(dim)) *
                                loud(i % dim));
  }
  return source;
}

std::vector<float> DrawRows(const std::vector<Source>& heads,
                            size_t num_tokens,
                            std::mt19937* random) {
  const size_t dim = heads[0].dim;
  std::vector<float> rows(num_tokens * heads.size() * dim);
  for (size_t row = 0; row < num_tokens * heads.size(); ++row) {
    heads[row % heads.size()].Draw(random, std::span(rows).subspan(row * dim, dim));
  }
  return rows;
}

}  // namespace

SyntheticText SyntheticModel::Text(uint32_t layer, size_t num_tokens, uint32_t seed) const {
  std::vector<Source> queries;
  std::vector<Source> keys;
  std::vector<Source> values;
  for (uint32_t head = 0; head < geometry.num_kv_heads; ++head) {
    const uint32_t id = 1000 * layer + 10 * head;
    // The query heads of a KV head look into the same directions.
    const uint32_t group = num_query_heads / geometry.num_kv_heads;
    queries.insert(queries.end(), group, MakeSource(geometry.key_dim, 1.5F, 0.3F, 1, id + 1));
    keys.push_back(MakeSource(geometry.key_dim, 0.5F, 0.7F, 4, id + 2));
    values.push_back(MakeSource(geometry.value_dim, 0.2F, 0, 1, id + 3));
  }
  std::mt19937 random(seed * 7919 + layer);
  SyntheticText text;
  text.queries = DrawRows(queries, num_tokens, &random);
  text.keys = DrawRows(keys, num_tokens, &random);
  text.values = DrawRows(values, num_tokens, &random);
  return text;
}

}  // namespace crumb
