// SPDX-License-Identifier: Apache-2.0
//
// What a Llama layer does besides matrix products. Rows are tokens, dense, f32. Thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace crumb::example {

// out = in / rms(in) * weight, row by row; rows of weight.size() elements.
void RmsNorm(std::span<const float> in,
             std::span<const float> weight,
             float epsilon,
             std::span<float> out);

// Rotary position embedding over pairs (2i, 2i + 1) of a head, which is the order of GGUF's Llama
// files: their query and key weights are permuted for it.
class RotaryEmbedding {
 public:
  // `factors` [head_dim / 2] divides the frequencies; may be empty.
  RotaryEmbedding(uint32_t head_dim, float base, std::span<const float> factors);

  // Sets the positions of the rows to come: [first_position, first_position + num_tokens).
  void SetPositions(uint32_t first_position, uint32_t num_tokens);
  // Rotates the head that `rows` starts at, in each of the rows, `stride` floats apart.
  void Apply(float* rows, uint32_t stride) const;

 private:
  struct Turn {
    float cosine = 1;
    float sine = 0;
  };
  uint32_t num_pairs_;
  std::vector<double> frequencies_;  // [num_pairs]
  std::vector<Turn> turns_;          // [num_tokens, num_pairs]
};

// out = silu(gate) * up, where a row of `gate_up` is [gate | up], each of `dim` elements.
void SwiGlu(std::span<const float> gate_up, uint32_t dim, std::span<float> out);

// target += source.
void Accumulate(std::span<const float> source, std::span<float> target);

}  // namespace crumb::example
