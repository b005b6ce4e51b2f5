// SPDX-License-Identifier: Apache-2.0
#include "client/example/llama_ops.h"

#include <cmath>
#include <cstddef>

namespace crumb::example {

void RmsNorm(std::span<const float> in,
             std::span<const float> weight,
             float epsilon,
             std::span<float> out) {
  const size_t dim = weight.size();
  for (size_t row = 0; row < in.size(); row += dim) {
    double squares = 0;
    for (size_t i = 0; i < dim; ++i) {
      squares += double{in[row + i]} * in[row + i];
    }
    const auto scale =
        static_cast<float>(1 / std::sqrt(squares / static_cast<double>(dim) + epsilon));
    for (size_t i = 0; i < dim; ++i) {
      out[row + i] = in[row + i] * scale * weight[i];
    }
  }
}

RotaryEmbedding::RotaryEmbedding(uint32_t head_dim, float base, std::span<const float> factors)
    : num_pairs_(head_dim / 2) {
  for (uint32_t i = 0; i < num_pairs_; ++i) {
    const double frequency = std::pow(double{base}, -2.0 * i / head_dim);
    frequencies_.push_back(factors.empty() ? frequency : frequency / factors[i]);
  }
}

void RotaryEmbedding::SetPositions(uint32_t first_position, uint32_t num_tokens) {
  turns_.clear();
  for (uint32_t token = 0; token < num_tokens; ++token) {
    for (const double frequency : frequencies_) {
      const double angle = frequency * (first_position + token);
      turns_.push_back({static_cast<float>(std::cos(angle)), static_cast<float>(std::sin(angle))});
    }
  }
}

void RotaryEmbedding::Apply(float* rows, uint32_t stride) const {
  const Turn* turn = turns_.data();
  for (size_t token = 0; token < turns_.size() / num_pairs_; ++token) {
    float* pair = rows + token * stride;
    for (uint32_t i = 0; i < num_pairs_; ++i, ++turn, pair += 2) {
      const float x = pair[0];
      const float y = pair[1];
      pair[0] = x * turn->cosine - y * turn->sine;
      pair[1] = x * turn->sine + y * turn->cosine;
    }
  }
}

void SwiGlu(std::span<const float> gate_up, uint32_t dim, std::span<float> out) {
  for (size_t row = 0; row < out.size() / dim; ++row) {
    const float* gate = gate_up.data() + row * 2 * dim;
    const float* up = gate + dim;
    float* target = out.data() + row * dim;
    for (uint32_t i = 0; i < dim; ++i) {
      target[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
    }
  }
}

void Accumulate(std::span<const float> source, std::span<float> target) {
  for (size_t i = 0; i < target.size(); ++i) {
    target[i] += source[i];
  }
}

}  // namespace crumb::example
