// SPDX-License-Identifier: Apache-2.0
//
// Draws the reservoir of one layer, text by text; see reservoir.h for what is drawn. Which tokens
// depends on the seed, the texts' numbers and their lengths alone, so all layers draw the same.
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "crumb/cuda/reservoir.h"
#include "cuda/calibrate/attention_rows.h"

namespace crumb::calibrate {

class ReservoirSampler {
 public:
  // `window` as Statistics::attention_windows.
  ReservoirSampler(uint64_t seed, uint32_t window) : seed_(seed), window_(window) {}

  // Text number `text`, each once, of more than Statistics::kFirstQueryToken tokens.
  void AddText(uint32_t text,
               const TokenRows& queries,
               const TokenRows& keys,
               const TokenRows& values);

  // Of a sampler that has seen nothing: takes up what AppendTo gave as layer number `layer` of
  // `num_kv_heads` heads, by a sampler of the same seed.
  void Restore(const Reservoir& reservoir, size_t layer, size_t num_kv_heads);

  // Appends this layer's rows; its tokens are those of `out`, or become so if that has none. False
  // if they differ: the layers have seen other texts.
  bool AppendTo(Reservoir* out) const;

 private:
  // Rows of the tokens of least priority, by priority; each [num_rows, H, dim].
  struct KeptText {
    uint32_t text = 0;
    uint64_t priority = 0;
    std::vector<uint32_t> key_positions;
    std::vector<uint32_t> query_positions;
    std::vector<float> keys;
    std::vector<float> values;
    std::vector<float> queries;
    std::vector<float> outputs;
    std::vector<float> lse;
  };

  void Trim(KeptText* kept) const;

  uint64_t seed_;
  uint32_t window_;
  size_t num_kv_heads_ = 0;
  std::vector<KeptText> kept_;  // By text.
};

}  // namespace crumb::calibrate
